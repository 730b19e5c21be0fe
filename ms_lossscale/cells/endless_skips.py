"""A training that only skips: weights that are NaN, say, with which no scale makes finite gradients."""

import warnings

import numpy as np

from ms_lossscale._output import LossScaleValues
from ms_lossscale.cells.skipped_series import SkippedSeries
from ms_lossscale.loss_scale import DynamicLossScale

# Calls between two looks, each of which waits for the device; before the first look there are fewer.
_CALLS, _FIRST_CALLS = 500, 50
# So many skips in a row are suspect, or one at the floor; and so many more are looked at before anything is said.
_SKIPS, _LOOKS = 100, 5


class EndlessSkips:
    """
    Warns, once, of a training that skips every step, or whose loss scale is at its floor and does so.

    Args:
        owner (str): The training cell's name.
        steps (CellList[Step]): Its steps.
        each_decides (bool): Whether each of several networks has its step.
    """

    def __init__(self, owner, steps, each_decides):
        self._owner = owner
        self._steps = steps
        self._each_decides = each_decides
        self._calls = 0
        self._has_warned = False
        # Of the step that is looked at, its number, what it skips, and its skips so far.
        self._number, self._series, self._skips = None, None, 0

    def after_call(self, outputs):
        """Counts a call, and looks at what it returned if there is reason to."""
        self._calls += 1
        if self._series is not None:
            self._look(outputs)
        elif not self._has_warned and (self._calls == _FIRST_CALLS or self._calls % _CALLS == 0):
            for i, step in enumerate(self._steps):
                skips = step.step_counters.as_dict()["consecutive_skipped_steps"]
                if skips >= _SKIPS or (skips and _is_at_floor(step)):
                    self._number, self._series, self._skips = i, SkippedSeries(step), skips

    def has_been_said(self):
        """Somebody else has warned."""
        self._has_warned = True
        self._series = None

    def _look(self, outputs):
        step, before = self._steps[self._number], self._skips
        counters = step.step_counters.as_dict()
        self._skips = counters["consecutive_skipped_steps"]
        if self._skips < before:
            self._series = None
        elif self._skips > before:
            first = counters["applied_steps"] + counters["skipped_steps"] - self._skips + 1
            loss, loss_scales = outputs[0], outputs[2]
            if self._each_decides:
                loss, loss_scales = outputs[3][self._number], loss_scales[self._number]
            used = np.atleast_1d(loss_scales.asnumpy()).tolist()
            self._series.add(first, step.step_counters.overflowed_parameters(), loss.asnumpy(), used)
            if len(self._series) == _LOOKS:
                self._warn(step, counters["applied_steps"] > 0)

    def _warn(self, step, has_trained):
        series = self._series
        self.has_been_said()
        scales = LossScaleValues(loss_scale.get_loss_scale() for loss_scale in step.loss_scales)
        of_network = f" of network {self._number}" if self._each_decides else ""
        warnings.warn(
            f"For '{self._owner}', the last {self._skips} steps{of_network}, all since step {series.since}, were "
            f"skipped, now at a loss scale of {scales.written()}, so that no weight moves any more: "
            f"{series.what_was_not_finite()}. {series.advice(has_trained)}",
            RuntimeWarning,
            stacklevel=5,
        )


def _is_at_floor(step):
    return any(
        isinstance(its, DynamicLossScale) and its.get_loss_scale() <= its.min_loss_scale for its in step.loss_scales
    )
