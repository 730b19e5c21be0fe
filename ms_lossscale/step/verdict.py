"""Whether a step overflowed: one answer over all gradients of all networks of the step, agreed across ranks."""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale.overflow_detector import FiniteGradients, OverflowDetector


class Ask(nn.Cell):
    """
    Asks an overflow detector. A user's own may answer in another shape or dtype.

    Args:
        overflow_detector (OverflowDetector): What is asked.
        blame (Cell): Whose overflow it was.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.

    Outputs:
        Tensor, bool, as that of `blame`.
    """

    def __init__(self, overflow_detector, blame):
        super().__init__(auto_prefix=False)
        name = type(overflow_detector).__name__
        if type(overflow_detector).construct is OverflowDetector.construct:
            raise TypeError(
                f"For '{name}', an overflow detector must define 'construct(self, grads)', but it does not. It gets a "
                f"tuple of gradients and returns whether they overflowed, a bool Tensor of shape ()."
            )
        self.overflow_detector = overflow_detector
        self.blame = blame
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
        return self.blame(overflow if overflow.dtype == mstype.bool_ else overflow.astype(mstype.bool_), grads)


class BlameAll(nn.Cell):
    """
    All networks share a loss scale.

    Inputs:
        - **overflow** (Tensor) - The verdict, bool of shape :math:`()`.
        - **grads** (tuple[Tensor]) - The gradients.

    Outputs:
        Tensor, the verdict.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, overflow, grads):
        return overflow


class BlameEach(nn.Cell):
    """
    Each network has a loss scale of its own: in a step that overflowed, those are to blame whose gradients are not
    finite. If none are, all are: something else told.

    Args:
        weights (list[ParameterTuple]): Those of each network.
        packing (Packing): Knows their gradients.

    Inputs as those of :class:`BlameAll`.

    Outputs:
        Tensor, bool of shape :math:`(N,)`, of which none is True unless the step overflowed.
    """

    def __init__(self, weights, packing):
        super().__init__(auto_prefix=False)
        self.packing = packing
        self._none = Tensor(np.zeros(len(weights), bool))
        networks = np.repeat(np.arange(len(weights)), [len(its) for its in weights])
        self._whose = Tensor(networks == np.arange(len(weights))[:, None])

    def construct(self, overflow, grads):
        to_blame = self._none
        if overflow:
            to_blame = self._not_finite(grads)
        all_are = ops.logical_not(ops.ReduceAny()(to_blame))
        return ops.logical_and(overflow, ops.logical_or(to_blame, all_are))

    def _not_finite(self, grads):
        # No loop: within a branch, graph mode forgets in one how long a tuple of equal tensors is.
        are_not = ops.logical_not(self.packing.each_finite(grads))
        return ops.ReduceAny()(ops.logical_and(are_not, self._whose), 1)


class AskOfCall(nn.Cell):
    """
    The verdict on one call of a window.

    Args:
        ask (Ask): The detector.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the call.
        - **earlier** (tuple[Tensor]) - What is known already.

    Outputs:
        Tensor, bool, as that of `ask`.
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
        blame (Cell): Whose overflow it was.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients, times `divisor`.
        - **divisor** (Tensor) - What they are still to be divided by.
        - **earlier** (tuple[Tensor]) - What is known already.

    Outputs:
        Tensor, bool, as that of `blame`.
    """

    def __init__(self, transforms, overflow_detector, ranks, blame):
        super().__init__(auto_prefix=False)
        self.transforms = transforms
        self.ask = Ask(overflow_detector, blame)
        self.ranks = ranks

    def construct(self, grads, divisor, earlier):
        self.transforms.measure(grads, divisor)
        return self.ranks.agree(any_of(self.ask(grads), earlier))


class NormVerdict(nn.Cell):
    """
    The norms decide, which are measured anyhow, and are finite whenever the gradients are.

    Args, inputs and outputs as those of :class:`DetectorVerdict`.
    """

    def __init__(self, transforms, ranks, blame):
        super().__init__(auto_prefix=False)
        self.transforms = transforms
        self.ranks = ranks
        self.blame = blame

    def construct(self, grads, divisor, earlier):
        are_finite = self.transforms.measure(grads, divisor)
        overflow = ops.logical_not(are_finite[0])
        for is_finite in are_finite[1:]:
            overflow = ops.logical_or(overflow, ops.logical_not(is_finite))
        return self.ranks.agree(any_of(self.blame(overflow, grads), earlier))


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


def make_verdict(checks, overflow_detector, transforms, ranks, blame):
    """The verdict that a step needs."""
    if not checks:
        return NoVerdict(transforms, overflow_detector)
    if transforms.tells and asks_gradients_only(overflow_detector):
        return NormVerdict(transforms, ranks, blame)
    return DetectorVerdict(transforms, overflow_detector, ranks, blame)


def asks_gradients_only(overflow_detector):
    """Whether norms can stand in for it. A user's own detector is asked, also one derived from FiniteGradients."""
    return type(overflow_detector) is FiniteGradients
