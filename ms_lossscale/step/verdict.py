"""Whether a step overflowed: one answer over all gradients of all networks of the step, agreed across ranks."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale.overflow_detector import FiniteGradients, OverflowDetector


class Ask(nn.Cell):
    """
    Asks an overflow detector. A user's own may answer in another shape or dtype.

    Args:
        overflow_detector (OverflowDetector): What is asked.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.

    Outputs:
        Tensor, bool of shape :math:`()`.
    """

    def __init__(self, overflow_detector):
        super().__init__(auto_prefix=False)
        name = type(overflow_detector).__name__
        if type(overflow_detector).construct is OverflowDetector.construct:
            raise TypeError(
                f"For '{name}', an overflow detector must define 'construct(self, grads)', but it does not. It gets a "
                f"tuple of gradients and returns whether they overflowed, a bool Tensor of shape ()."
            )
        self.overflow_detector = overflow_detector
        self._not_one_verdict = (
            f"For '{name}', 'construct' must return one verdict over all gradients, a bool Tensor of shape (), but it "
            f"returned something else. Reduce a verdict on each element with .any(); make a Tensor of a Python bool."
        )

    def construct(self, grads):
        overflow = self.overflow_detector(grads)
        if not isinstance(overflow, Tensor):
            raise TypeError(self._not_one_verdict)
        if overflow.shape != ():
            if overflow.size != 1:
                raise ValueError(self._not_one_verdict)
            overflow = overflow.reshape(())
        return overflow if overflow.dtype == mstype.bool_ else overflow.astype(mstype.bool_)


class AskOfCall(nn.Cell):
    """
    The verdict on one call of a window.

    Args:
        ask (Ask): The detector.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the call.
        - **earlier** (tuple[Tensor]) - What is known already.

    Outputs:
        Tensor, bool of shape :math:`()`.
    """

    def __init__(self, ask):
        super().__init__(auto_prefix=False)
        self.ask = ask

    def construct(self, grads, earlier):
        return any_of(self.ask(grads), earlier)


class KnownOfCall(nn.Cell):
    """The verdict on one call of a window that was judged before. Inputs and outputs as those of :class:`AskOfCall`."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, grads, earlier):
        return any_of(earlier[0], earlier[1:])


def any_of(overflow, others):
    """Whether any of them is True."""
    for each in others:
        overflow = ops.logical_or(each, overflow)
    return overflow


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
        self.ask = Ask(overflow_detector)
        self.ranks = ranks

    def construct(self, grads, divisor, earlier):
        self.transforms.measure(grads, divisor)
        return self.ranks.agree(any_of(self.ask(grads), earlier))


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
        return self.ranks.agree(any_of(overflow, earlier))


class KnownVerdict(nn.Cell):
    """The try that is taken was judged before. Inputs and outputs as those of :class:`DetectorVerdict`."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, grads, divisor, earlier):
        return earlier[0]


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
