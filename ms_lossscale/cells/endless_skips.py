"""Notices a training that skips every step, because of weights that are NaN, for example."""

from collections import Counter, deque
from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale._arguments import listed
from ms_lossscale._output import LossScaleValues, counted, written_scale
from ms_lossscale._user_warnings import warn_user
from ms_lossscale._values import not_finite_weights, on_not_finite
from ms_lossscale.cells.skip_reasons import CONDITION, SkipReasons, described_conditions
from ms_lossscale.cells.watched_weights import WatchedWeights
from ms_lossscale.overflow_detector import FloatStatusRegister
from ms_lossscale.step.held_call import OwnForward

# The number of calls between two looks, which wait for the device. The first look comes earlier.
_CALLS, _FIRST_CALLS = 500, 50
# The skips in a row that are suspect (at the floor, one is), and how many more are looked at before it warns.
_SKIPS, _LOOKS = 100, 5


class EndlessSkips:
    """
    Warns once if a training skips every step, or does so with its loss scale at the floor. Looks at the `weights` where
    it reads anyway.
    """

    def __init__(self, owner, steps, each_decides):
        self._owner = owner
        self._steps = steps
        self._each_decides = each_decides
        self._calls = 0
        self._has_warned = False
        self.weights = WatchedWeights(owner, steps, each_decides)
        # The number of the step that is looked at, the skipped series, and its skips so far.
        self._number, self._series, self._skips = None, None, 0
        self._reasons = None

    def after_call(self, outputs):
        """Counts a call, and looks at its results if there is reason to."""
        self._calls += 1
        if self._series is not None:
            self._look(outputs)
        elif self._calls == _FIRST_CALLS or self._calls % _CALLS == 0:
            self.weights.look()
            for i, step in enumerate(() if self._has_warned else self._steps):
                skips = step.update.step_counters.as_dict()["consecutive_skipped_steps"]
                if skips >= _SKIPS or (skips and _is_at_floor(step)):
                    self._number, self._series, self._skips = i, SkippedSeries(step), skips
                    self._reasons = SkipReasons(step)

    def silence(self):
        """Stops warning: the user has been told, here or elsewhere."""
        self._has_warned = True
        self._series = None

    def _look(self, outputs):
        step, before = self._steps[self._number], self._skips
        counters = step.update.step_counters.as_dict()
        self._skips = counters["consecutive_skipped_steps"]
        reasons = self._reasons.since_last(self._reasons.counts)
        # A condition does not ask for a lower scale, so that the floor is no sign.
        if self._skips < before or (set(reasons) == {CONDITION} and self._skips < _SKIPS):
            self._series = None
        elif self._skips > before:
            first = counters["applied_steps"] + counters["skipped_steps"] - self._skips + 1
            loss, loss_scales = outputs[0], outputs[2]
            if self._each_decides:
                loss, loss_scales = outputs[3][self._number], loss_scales[self._number]
            used = np.atleast_1d(loss_scales.asnumpy()).tolist()
            loss = None if loss is None else loss.asnumpy()
            self._series.add(first, step.update.step_counters.overflowed_parameters(), loss, used, reasons)
            if len(self._series) == _LOOKS:
                self._warn(step, counters["applied_steps"] > 0)

    def _warn(self, step, has_trained):
        series = self._series
        self.silence()
        scales = LossScaleValues(loss_scale.get_loss_scale() for loss_scale in step.scaling.loss_scales)
        of_network = f" of network {self._number}" if self._each_decides else ""
        warn_user(
            f"For '{self._owner}', the last {self._skips} steps{of_network}, all since step {series.since}, were "
            f"skipped, now at a loss scale of {scales.written()}, so that no weight changes any more: "
            f"{series.what_was_not_finite()}. {series.advice(has_trained)} {OTHER_SYMPTOMS}"
        )


def _is_at_floor(step):
    loss_scales = step.scaling.loss_scales
    return any(its.min_loss_scale is not None and its.get_loss_scale() <= its.min_loss_scale for its in loss_scales)


# What the longest messages end with.
OTHER_SYMPTOMS = "Other symptoms and their causes: docs/symptoms.md."
# How many of the last skips are remembered, and how many names are shown.
_LAST, _MOST_NAMES = 10, 5
# How much smaller a floor is suggested, and the smallest loss scale there is.
_MUCH_LOWER, _SMALLEST = 2.0**-12, 2.0**-126


class _Skip(NamedTuple):
    """The parameters whose gradients overflowed, whether the loss was finite, if known, and what asked for it."""

    overflowed: list[str]
    loss_is_finite: Optional[bool]
    is_by_condition: bool


class SkippedSeries:
    """Knows the steps that were skipped in a row, and advises what to look at."""

    def __init__(self, step):
        self._step = step
        # The number of the first one.
        self.since = None
        self._last = deque(maxlen=_LAST)
        # The loss scale of each step, or a list of several.
        self.loss_scales = []

    def __len__(self):
        """Returns how many of the last ones it remembers."""
        return len(self._last)

    def add(self, number, overflowed, loss, loss_scales, reasons):
        """
        Adds a step: its number, the names of the parameters whose gradients overflowed, its loss, None if that is not
        known, its loss scales, and the reasons why it was skipped.
        """
        if self.since is None:
            self.since = number
        is_finite = None if loss is None else bool(np.isfinite(loss).all())
        self._last.append(_Skip(overflowed, is_finite, set(reasons) == {CONDITION}))
        self.loss_scales.append(loss_scales)

    def what_was_not_finite(self):
        """
        Says which gradients were not finite, how often, whether the loss was, if known, and whether conditions asked
        for it; without a full stop.
        """
        names = [f"{name} ({count})" for name, count in self._names().most_common()]
        gradients = (
            f"the gradients of {listed(names, _MOST_NAMES)} were not finite" if names else "all gradients were finite"
        )
        losses = self._losses_not_finite()
        loss = "; the loss was finite" if self._knows_losses() else ""
        if losses:
            loss = f"; the loss was not finite in {losses} of them"
        by_condition = self._number_by_condition()
        condition = ""
        if by_condition:
            number = "all" if by_condition == len(self._last) else by_condition
            condition = f"; a condition asked for {number} of them: {described_conditions(self._step)}"
        return f"in the last {counted(len(self._last), 'skip', 'skips')} {gradients}{loss}{condition}"

    def advice(self, has_trained):
        """Advises what to look at, with lines to run. `has_trained` says whether a step was ever applied."""
        remark = on_not_finite(not_finite_weights(self._step.forwards_and_backwards.get_parameters()))
        if remark:
            return remark
        if self.shows_no_overflow():
            return f"What to try: {self._on_conditions()}"
        if not self._names() and not self._losses_not_finite():
            return f"What to try: {self._where_no_gradient_shows_it()}"
        advise = f"ms_lossscale.advise_float32({self._what_to_run()}, [inputs])"
        lines = f"{self._locate()} names where it begins, {advise} which cells need float32{self._what_is_run()}"
        rate = " If it trained before, lower the learning rate or pass clip_norm." if has_trained else ""
        if self._losses_not_finite():
            return (
                f"What to try: no loss scale fixes a loss that is not finite, so look for NaN in the data (the "
                f"weights are finite); {lines}.{rate}"
            )
        if not all(its.backs_off for its in self._step.scaling.loss_scales):
            return (
                f"What to try: this loss scale does not fall, so use a DynamicLossScale, for which "
                f"{self._find()} finds one; {lines}.{rate}"
            )
        what = "the backward" if self._knows_losses() else "the forward or the backward"
        return f"What to try: {what} overflows at every scale down to this one{self._below_the_floor()}: {lines}.{rate}"

    def _on_conditions(self):
        return (
            "nothing overflows, so leave the loss scale as it is, and look at the condition and its threshold. What it "
            "remembers moves in applied steps only, so that a loss or a norm that has risen for good is skipped for "
            'ever. With clip_norm=float("inf"), grad_norm() tells the norm of each step: a larger max_norm or z_score '
            "of NormSpike(...) may do, or, if training itself has become unstable, a lower learning rate."
        )

    def shows_no_overflow(self):
        """Whether conditions asked for the last skips, while gradients and losses were finite."""
        by_condition = self._number_by_condition()
        return by_condition == len(self._last) and not self._names() and not self._losses_not_finite()

    def _below_the_floor(self):
        floor = self._step.scaling.loss_scales[self._number_that_overflowed()].min_loss_scale
        if floor is None or not _SMALLEST < floor >= self.overflowed_scale():
            return ""
        lower = written_scale(max(floor * _MUCH_LOWER, _SMALLEST))
        reason = "since the loss is finite" if self._knows_losses() else "if the loss is finite"
        return (
            f", the floor. A smaller one may do, {reason}: let it fall further, min_loss_scale={lower}, say "
            f"({self._find()} tells for a batch). To keep the floor"
        )

    @property
    def is_manual(self):
        """Whether the user's code runs forward and backward, and no training cell."""
        return isinstance(self._step.forwards_and_backwards, OwnForward)

    def _what_to_run(self):
        return "forward, step.parameters" if self.is_manual else "cell"

    def _what_is_run(self):
        return " (forward is the function that you differentiate, step the ManualStep)" if self.is_manual else ""

    def _find(self):
        if not self.is_manual:
            return "cell.find_loss_scale(*inputs)"
        return f"ms_lossscale.profile_gradients({self._what_to_run()}, [inputs]).recommended_loss_scale"

    def overflowed_scale(self):
        """Returns the loss scale of the last skip. Of several, it is the first whose gradients overflowed."""
        return self.loss_scales[-1][self._number_that_overflowed()]

    def _number_that_overflowed(self):
        return self._step.overflowed_loss_scales(self._last[-1].overflowed).index(True)

    def _names(self):
        return Counter(name for skip in self._last for name in skip.overflowed)

    def _losses_not_finite(self):
        return sum(skip.loss_is_finite is False for skip in self._last)

    def _knows_losses(self):
        return all(skip.loss_is_finite is not None for skip in self._last)

    def _number_by_condition(self):
        return sum(skip.is_by_condition for skip in self._last)

    def _locate(self):
        what = "forward" if self.is_manual else "cell"
        return f"ms_lossscale.locate_overflow({what}, inputs, loss_scale={written_scale(self.overflowed_scale())})"

    def _where_no_gradient_shows_it(self):
        written = self._step.forward_state.names
        reports = "the overflow detector reports an overflow"
        if isinstance(self._step.forwards_and_backwards.overflow_detector, FloatStatusRegister):
            reports += (
                f" by the status register, which no gradient shows: {self._locate()} names the cell that raises it, in "
                f"the forward or in the backward, and what to do"
            )
        elif not written:
            reports += ", so look for it in the forward"
        if not written:
            return f"{reports}."
        return (
            f"what the forward writes ({listed(written, _MOST_NAMES)}) became not finite, or {reports}. A value that "
            f"is infinite on purpose must be in its Parameter before the first step."
        )
