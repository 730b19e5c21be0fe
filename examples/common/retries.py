"""How often the steps of a training cell were tried again."""

import numpy as np
from mindspore import ops


class Retries:
    """
    Reads the retries of each step of a cell from its counters.

    Args:
        cell (Cell): A training cell of ms_lossscale.
    """

    def __init__(self, cell):
        counters = cell.step_counters if isinstance(cell.step_counters, list) else [cell.step_counters]
        self._counts = [its.retries for its in counters if its.counts_retries]
        self._before = self._read(self.snapshot())

    def snapshot(self):
        """Copies of the present counts on the device, which the host does not wait for."""
        return [ops.deepcopy(count) for count in self._counts]

    def total(self):
        """All retries so far, those of all networks."""
        return self._read(self.snapshot()).sum()

    @staticmethod
    def _read(snapshot):
        return np.array([int(count.asnumpy()) for count in snapshot] or [0])

    def since_the_last(self, snapshot):
        """For each step that a call makes, the retries between the snapshot read before and this one; ints."""
        counts = self._read(snapshot)
        since, self._before = counts - self._before, counts
        return since


def print_steps(cell, epoch, steps_per_epoch, skipped):
    """Prints how many steps a training cell has made, and what became of those that overflowed."""
    retries = Retries(cell).total()
    again = f", after {retries} retries at lower loss scales" if retries else ""
    print(f"Trained {epoch} epochs of {steps_per_epoch} steps; skipped {skipped} steps that overflowed{again}")
