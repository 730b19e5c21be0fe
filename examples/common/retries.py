"""Counts the retries and the skipped steps of a training cell."""

import numpy as np
from mindspore import ops

from common.output import counted


class Retries:
    """
    Reads the retries in each step of a cell from its counters.

    Args:
        cell (Cell): A training cell of ms_lossscale.
    """

    def __init__(self, cell):
        parameters = cell.parameters_dict()
        self._counts = [parameters[name] for name in parameters if name.endswith("step_counters.retries")]
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


def skipped_so_far(cell, args):
    """
    Returns what a training cell has skipped so far, as text, empty if it does not check. With --accumulate, a step is a
    cycle of several batches.
    """
    if args.loss_scale in ("none", "fixed-no-drop"):
        return ""
    counters = cell.counters()
    counters = counters if isinstance(counters, list) else [counters]
    names = ("step", "steps") if args.accumulate == 1 else ("cycle", "cycles")
    return f"skipped {counted(sum(its['skipped_steps'] for its in counters), *names)}"


def print_steps(cell, args, epoch, batches_per_epoch):
    """Prints how much a training cell has trained, and how many of its steps were skipped and retried."""
    of_epoch = counted(batches_per_epoch, "step", "steps")
    if args.accumulate > 1:
        of_epoch = f"{counted(batches_per_epoch, 'batch', 'batches')}, in cycles of {args.accumulate}"
    skipped = skipped_so_far(cell, args)
    checked = f"{skipped} that overflowed" if skipped else "nothing was checked for overflow"
    retries = Retries(cell).total()
    again = f", after {counted(retries, 'retry', 'retries')} at lower loss scales" if retries else ""
    print(f"Trained {counted(epoch, 'epoch', 'epochs')} of {of_epoch}; {checked}{again}")
