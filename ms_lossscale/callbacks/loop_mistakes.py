"""What a loop of one's own may get wrong around a monitor, and only the counters of the cell show."""

from ms_lossscale._output import warn_user


class LoopMistakes:
    """Warns once of a loop that tells a monitor of other steps than those of the cell that is watched."""

    def __init__(self, cell):
        self._cell = cell
        self._calls_made = self._count_calls()
        self._has_moved = False
        self._has_warned = False

    def _count_calls(self):
        """Returns numbers that change with each call of the cell."""
        return [self._cell.steps_made(), *(int(count.value.asnumpy()) for count in self._cell._cycle_counts())]

    def look_at(self, watched, record, is_call):
        """Looks at a record that was just read. Warns of an overflow that is the opposite of what was counted."""
        self._has_moved = self._has_moved or not is_call or watched.has_moved()
        if watched.contradicts(record):
            self._warn(
                f"{watched.prefix}step {record.step} came with an overflow of {not record.skipped}, but was "
                f"{'skipped' if record.skipped else 'applied'}. Pass what the step returned, as it is"
            )

    def end_reading(self, last):
        """Warns if the cell made none of the calls that were read, up to `last`."""
        if not self._has_moved:
            # Of alternating networks, none may have taken part.
            calls_made = self._count_calls()
            if calls_made == self._calls_made:
                self._warn(
                    f"the {type(self._cell).__name__} that is watched made no step before {last}. Pass the cell that "
                    f"makes the steps: with monitor.watching(cell)"
                )
            self._calls_made = calls_made
        self._has_moved = False

    def _warn(self, what):
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"For 'LossScaleMonitor.after_step', {what}.")
