"""The moving averages of a training cell's weights, and an evaluation with them."""

import contextlib

from ms_lossscale.step.update import averages_in_place


class Averages:
    """Knows the averages of all networks, and whether the weights hold them at present."""

    def __init__(self, owner, steps):
        self._owner, self._steps = owner, list(steps)
        self.are_in_place = False

    def refuse(self, what):
        """Raises an error: the weights hold their averages, so there can't be `what`."""
        raise RuntimeError(
            f"For '{self._owner}', {what} within 'ema_weights()' would change the averages that the weights hold "
            f"there, and be lost when the trained weights come back. Leave the context first."
        )

    def of_each(self, method):
        """Returns a MovingAverage for each network that has one. Raises if none has: `method` needs one."""
        averages = []
        for step in self._steps:
            if step.update.step_counters.none_applied():
                for average in step.update.moving_averages:
                    average.begin()
            averages += step.update.moving_averages
        if not averages:
            raise RuntimeError(
                f"For '{self._owner}', '{method}()' needs 'ema_decay': no average is kept without it. "
                f"Construct the cell with ema_decay=0.999, say."
            )
        return averages

    @contextlib.contextmanager
    def in_place(self, averages):
        """A context in which the weights hold these averages."""
        outer, self.are_in_place = self.are_in_place, True
        try:
            with averages_in_place(averages):
                yield
        finally:
            self.are_in_place = outer
