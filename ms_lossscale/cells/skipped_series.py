"""What is known of steps that were skipped one after the other, and what to look at."""

from collections import Counter, deque

import numpy as np

from ms_lossscale._arguments import listed
from ms_lossscale._output import counted, written_scale
from ms_lossscale.loss_scale import DynamicLossScale

# Of the last skips so many are remembered, and so many names are shown.
_LAST, _MOST_NAMES = 10, 5


class SkippedSeries:
    """
    Steps that were skipped one after the other.

    Args:
        step (Step): What skipped them.
    """

    def __init__(self, step):
        self._step = step
        # The number of the first one.
        self.since = None
        self._last = deque(maxlen=_LAST)
        self._loss_scales = ()

    def __len__(self):
        """How many of the last ones it remembers."""
        return len(self._last)

    def add(self, number, overflowed, loss, loss_scales):
        """
        Adds a step.

        Args:
            number (int): The step's.
            overflowed (list[str]): The parameters whose gradients were not finite.
            loss (numpy.ndarray): What the networks returned.
            loss_scales (Sequence[float]): What it used, of each loss scale of the step.
        """
        if self.since is None:
            self.since = number
        self._last.append((overflowed, bool(np.isfinite(loss).all())))
        self._loss_scales = loss_scales

    def what_was_not_finite(self):
        """Which gradients, how often, and whether the loss itself was finite: a sentence without its full stop."""
        names = [f"{name} ({count})" for name, count in self._names().most_common()]
        gradients = (
            f"the gradients of {listed(names, _MOST_NAMES)} were not finite" if names else "all gradients were finite"
        )
        losses = self._losses_not_finite()
        loss = f"not finite in {losses} of them" if losses else "finite"
        return f"in the last {counted(len(self._last), 'skip', 'skips')} {gradients}; the loss was {loss}"

    def advice(self, has_trained):
        """
        What to look at, and the lines to run.

        Args:
            has_trained (bool): Whether a step was ever applied.
        """
        if not self._names():
            return f"What to try: {self._where_no_gradient_shows_it()}"
        locate = f"ms_lossscale.locate_overflow(cell, inputs, loss_scale={written_scale(self.overflowed_scale())})"
        lines = f"{locate} names where it begins, ms_lossscale.advise_float32(cell, [inputs]) which cells need float32"
        rate = " If it trained before, lower the learning rate or pass clip_norm." if has_trained else ""
        if self._losses_not_finite():
            return (
                f"What to try: no loss scale mends a loss that is not finite, so look for NaN in the data and in the "
                f"weights; {lines}.{rate}"
            )
        if not all(isinstance(its, DynamicLossScale) for its in self._step.loss_scales):
            return (
                f"What to try: this loss scale does not fall, so take a DynamicLossScale, for which "
                f"cell.find_loss_scale(*inputs) finds one; {lines}.{rate}"
            )
        return f"What to try: the backward overflows at every scale down to this one: {lines}.{rate}"

    def overflowed_scale(self):
        """The loss scale of the last skip; of several the first whose gradients overflowed."""
        return self._loss_scales[self._step.overflowed_loss_scales(self._last[-1][0]).index(True)]

    def _names(self):
        return Counter(name for overflowed, _ in self._last for name in overflowed)

    def _losses_not_finite(self):
        return sum(not is_finite for _, is_finite in self._last)

    def _where_no_gradient_shows_it(self):
        written = self._step.forward_state.names
        if not written:
            return "the overflow detector reports an overflow, so look for it in the forward."
        # The status register is a detector, too.
        return (
            f"what the forward writes ({listed(written, _MOST_NAMES)}) became not finite, or the overflow detector "
            f"reports an overflow. A value that is infinite on purpose must be in its Parameter before the first step."
        )
