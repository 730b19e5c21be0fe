"""Whether a step overflowed: one answer over all gradients of all networks of the step, agreed across ranks."""

from mindspore import nn, ops

from ms_lossscale.overflow_detector import FiniteGradients


class DetectorVerdict(nn.Cell):
    """
    The overflow detector decides.

    Args:
        transforms (GradientTransforms): Measure the gradients before the verdict.
        overflow_detector (OverflowDetector): What is asked.
        ranks (Union[Alone, Ranks]): Who must agree.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients, times `divisor`.
        - **divisor** (Tensor) - What they are still to be divided by.
        - **earlier** (tuple[Tensor]) - What is known already.

    Outputs:
        Tensor, bool of shape :math:`()`.
    """

    def __init__(self, transforms, overflow_detector, ranks):
        super().__init__(auto_prefix=False)
        self.transforms = transforms
        self.overflow_detector = overflow_detector
        self.ranks = ranks

    def construct(self, grads, divisor, earlier):
        self.transforms.measure(grads, divisor)
        overflow = self.overflow_detector(grads)
        for each in earlier:
            overflow = ops.logical_or(each, overflow)
        return self.ranks.agree(overflow)


class NormVerdict(nn.Cell):
    """
    The norms decide, which are measured anyhow, and are finite whenever the gradients are.

    Args, inputs and outputs as those of :class:`DetectorVerdict`.
    """

    def __init__(self, transforms, ranks):
        super().__init__(auto_prefix=False)
        self.transforms = transforms
        self.ranks = ranks

    def construct(self, grads, divisor, earlier):
        are_finite = self.transforms.measure(grads, divisor)
        overflow = ops.logical_not(are_finite[0])
        for is_finite in are_finite[1:]:
            overflow = ops.logical_or(overflow, ops.logical_not(is_finite))
        for each in earlier:
            overflow = ops.logical_or(each, overflow)
        return self.ranks.agree(overflow)


class NoVerdict(nn.Cell):
    """No step overflows. Args, inputs and outputs as those of :class:`DetectorVerdict`."""

    def __init__(self, transforms, overflow_detector):
        super().__init__(auto_prefix=False)
        self.transforms = transforms
        self.overflow_detector = overflow_detector

    def construct(self, grads, divisor, earlier):
        self.transforms.measure(grads, divisor)
        return self.overflow_detector(grads)


def make_verdict(checks, overflow_detector, transforms, ranks):
    """The verdict that a step needs."""
    if not checks:
        return NoVerdict(transforms, overflow_detector)
    if transforms.tells and asks_gradients_only(overflow_detector):
        return NormVerdict(transforms, ranks)
    return DetectorVerdict(transforms, overflow_detector, ranks)


def asks_gradients_only(overflow_detector):
    """Whether norms can stand in for it. A user's own detector is asked, also one derived from FiniteGradients."""
    return type(overflow_detector) is FiniteGradients
