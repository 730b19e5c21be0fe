"""Warns once of what goes wrong in silence: endless skips, weights that are NaN, weights that no gradient reaches."""

import numpy as np

from ms_lossscale._arguments import listed
from ms_lossscale._output import LossScaleValues
from ms_lossscale._user_warnings import warn_user
from ms_lossscale._values import as_array, not_finite_weights, of_optimizers, on_not_finite, why_unreached

# How many skips in a row are suspect, and how many of them where the loss scale can't fall further.
_SKIPS, _SKIPS_AT_FLOOR = 100, 10
# How many values of each weight are compared, after so many applied steps: a learning rate may begin at zero.
_VALUES, _APPLIED = 1024, 3
# What to do about skips, by their reason.
ADVICE = {
    "condition": "nothing overflows, so look at the condition and its threshold, and leave the loss scale as it is",
    "loss": "no loss scale fixes a loss that is not finite: ms_lossscale.locate_overflow names the cell where it begins",
    "forward_state": "look at what the forward writes, see forward_state_names(): a value that is infinite on purpose "
    "must be in its Parameter before the first step",
    "gradients": "the backward overflows at every scale so far: find_loss_scale finds a lower one, if there is any, "
    "and ms_lossscale.advise_float32 the cells that need float32. A number as the loss scale does not fall",
    "detector": "all gradients are finite, so look at your overflow detector; or, where an NPU's status register "
    "tells, for values in the network that overflow and are clipped or masked afterwards",
}


class Warnings:
    """Looks at the steps of a training cell, or of a ManualStep, after some of its calls."""

    def __init__(self, owner, steps):
        self._owner, self._steps = owner, [step.transaction for step in steps]
        self._told = set()
        # For each step, the reasons that were counted at the last look, and its weights as they were at the first call.
        self._reasons, self._begun = [{} for _ in steps], [None for _ in steps]

    def begin(self):
        """Remembers the weights, after the first call."""
        self._begun = [(its.counters.as_dict()["applied_steps"], _values(its)) for its in self._steps]

    def look(self):
        """Looks at what the steps have left. It waits for the device."""
        for i, step in enumerate(self._steps):
            self._look(i, step, f" of network {i}" if len(self._steps) > 1 else "")

    def _look(self, i, step, of_network):
        counts = step.counters.as_dict()
        skips = counts["consecutive_skipped_steps"]
        scales = LossScaleValues(its.get_loss_scale() for its in step.loss_scales)
        at_floor = any(scale <= (its.min_loss_scale or 0) for scale, its in zip(scales, step.loss_scales))
        before, self._reasons[i] = self._reasons[i], step.counters.reasons()
        not_finite = not_finite_weights(step.optimizers.parameters)
        if not_finite:
            self._tell("weights", f"after step {step.counters.steps_made()}{of_network}: {on_not_finite(not_finite)}")
        elif skips >= (_SKIPS_AT_FLOOR if at_floor else _SKIPS):
            reason = max(self._reasons[i], key=lambda its: self._reasons[i][its] - before.get(its, 0))
            names = listed(step.counters.overflowed_parameters(), 5) or "none"
            self._tell(
                "skips",
                f"the last {skips} steps{of_network} were skipped, now at a loss scale of {scales.written()}, so that "
                f"no weight changes any more. By skip_reasons() it is mostly '{reason}'; the gradients that were not "
                f"finite last: {names}. What to try: {ADVICE[reason]}.",
            )
        elif self._begun[i] and counts["applied_steps"] >= self._begun[i][0] + _APPLIED:
            numbers = _numbers_of_unchanged(self._begun[i][1], _values(step), i, len(self._steps))
            self._begun[i] = None
            if numbers:
                self._tell(
                    "unreached",
                    f"no weight{of_optimizers(numbers)} has changed since the first call: unless the learning rate is "
                    f"0 so far, no gradient reaches any. {why_unreached(numbers)}",
                )

    def _tell(self, kind, what):
        if kind not in self._told:
            self._told.add(kind)
            warn_user(f"For '{self._owner}', {what} More symptoms and causes: docs/diagnosis.md.")


def _values(transaction):
    """Returns some values of the weights of each optimizer."""
    return [
        [np.array(as_array(weight).reshape(-1)[:: weight.size // _VALUES + 1]) for weight in its.parameters]
        for its in transaction.optimizers.optimizers
    ]


def _numbers_of_unchanged(before, after, first, steps):
    """Returns the numbers of the optimizers none of whose weights has changed, None for the only one there is."""
    several = steps > 1 or len(before) > 1
    return [
        first + i if several else None
        for i, both in enumerate(zip(before, after))
        # NaN is unequal to itself.
        if all(np.array_equal(*values, equal_nan=True) for values in zip(*both))
    ]
