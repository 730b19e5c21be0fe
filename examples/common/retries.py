"""Counts the retries of a training cell's steps."""

import numpy as np
from mindspore import ops


class Retries:
    """
    Reads the retries in each step of a cell from its counters.

    Args:
        cell (Cell): A training cell of ms_lossscale.
    """

    def __init__(self, cell):
        counters = cell.step_counters if isinstance(cell.step_counters, list) else [cell.step_counters]
        self._counts = [its.retries for its in counters if its.counts_retries]
        self._before = self._read(self.snapshot())

    def snapshot(self):
        """Copies the present counts on the device, without waiting for it."""
        return [ops.deepcopy(count) for count in self._counts]

    def total(self):
        """Returns the retries so far, of all networks."""
        return self._read(self.snapshot()).sum()

    @staticmethod
    def _read(snapshot):
        return np.array([int(count.asnumpy()) for count in snapshot] or [0])

    def since_the_last(self, snapshot):
        """Returns the retries since the snapshot read before, for each step that a call makes; ints."""
        counts = self._read(snapshot)
        since, self._before = counts - self._before, counts
        return since


def print_steps(cell, epoch, steps_per_epoch, skipped):
    """Prints how many steps a training cell has made, skipped and retried."""
    retries = Retries(cell).total()
    again = f", after {retries} retries at lower loss scales" if retries else ""
    print(f"Trained {epoch} epochs of {steps_per_epoch} steps; skipped {skipped} steps that overflowed{again}")
