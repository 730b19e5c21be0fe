"""
Whether a step overflowed: one answer over all gradients of all networks of the step, agreed across ranks.

Where each network has a loss scale of its own it is of shape (N,): who is to blame for that one answer.
"""

import numpy as np
from mindspore import Tensor, get_context, nn, ops
from mindspore import dtype as mstype

from ms_lossscale.overflow_detector import FiniteGradients, OverflowDetector
from ms_lossscale.step.of_network import any_of, of_any_network


class OwnDetector(nn.Cell):
    """
    A user's own overflow detector, which may answer in another shape or dtype, or not at all.

    Args:
        overflow_detector (OverflowDetector): What is asked.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.

    Outputs:
        Tensor, its answer, bool of shape :math:`()`.
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
        if overflow.dtype != mstype.bool_:
            overflow = overflow.astype(mstype.bool_)
        return overflow


class Ask(nn.Cell):
    """
    Asks an overflow detector about gradients.

    Args:
        overflow_detector (OverflowDetector): What is asked.
        blame (Cell): Whose overflow it was.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **overflows** (tuple[Tensor]) - What else tells of an overflow, bools of shape :math:`()`.

    Outputs:
        Tuple of two: the answer, bool, as that of `blame`, and a tuple of the flags of :class:`Packing` if they became
        known with it, else empty.
    """

    def __init__(self, overflow_detector, blame):
        super().__init__(auto_prefix=False)
        is_own = type(overflow_detector).__module__ != OverflowDetector.__module__
        self.detect = OwnDetector(overflow_detector) if is_own else overflow_detector
        self.blame = blame

    def construct(self, grads, overflows):
        return self.blame(any_of(self.detect(grads), overflows), grads, ()), ()


class AskEach(nn.Cell):
    """
    The same in the place of :class:`FiniteGradients` on CPU, which looks at each gradient.

    Args:
        packing (Packing): Checks them.
        blame (Cell): Whose overflow it was.

    Inputs and outputs as those of :class:`Ask`.
    """

    def __init__(self, packing, blame):
        super().__init__(auto_prefix=False)
        self.packing = packing
        self.blame = blame

    def construct(self, grads, overflows):
        are_finite = self.packing.check(grads)
        overflow = any_of(ops.logical_not(ops.ReduceAll()(are_finite)), overflows)
        return self.blame(overflow, grads, (are_finite,)), (are_finite,)


def make_ask(overflow_detector, packing, blame):
    """What asks the detector."""
    if packing.checks and asks_gradients_only(overflow_detector) and get_context("device_target") == "CPU":
        return AskEach(packing, blame)
    return Ask(overflow_detector, blame)


class BlameAll(nn.Cell):
    """
    All networks share a loss scale.

    Inputs:
        - **overflow** (Tensor) - The verdict, bool of shape :math:`()`.
        - **grads** (tuple[Tensor]) - The gradients.
        - **flags** (tuple[Tensor]) - Which of them are finite, as told by :class:`Ask`.

    Outputs:
        Tensor, the verdict.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, overflow, grads, flags):
        return overflow

    def of_each(self, not_finite, overflows):
        """The same where it is known of each network whether its gradients are not finite, as a tuple."""
        return any_of(not_finite[0], (*not_finite[1:], *overflows))


class BlameEach(nn.Cell):
    """
    Each network has a loss scale of its own: in a step that overflowed, those are to blame whose gradients are not
    finite. If none are, all are: something else told.

    Args:
        packing (Packing): Tells of each gradient whether it is finite.

    Inputs as those of :class:`BlameAll`.

    Outputs:
        Tensor, bool of shape :math:`(N,)`, of which none is True unless the step overflowed.
    """

    def __init__(self, packing):
        super().__init__(auto_prefix=False)
        self.packing = packing
        networks = np.array(packing.networks_of_flags())
        self._whose = Tensor(networks == np.unique(networks)[:, None])
        self._all = Tensor(np.ones(len(networks), bool))

    def construct(self, overflow, grads, flags):
        if flags:
            are_finite = flags[0]
        else:
            are_finite = self._all
            if overflow:
                are_finite = self.packing.each_finite(grads)
        are_not_finite = ops.logical_and(ops.logical_not(are_finite), self._whose)
        return self._or_all(ops.ReduceAny()(are_not_finite, 1), overflow)

    def of_each(self, not_finite, overflows):
        to_blame = ops.stack(not_finite)
        return self._or_all(to_blame, any_of(of_any_network(to_blame), overflows))

    @staticmethod
    def _or_all(to_blame, overflow):
        none_is = ops.logical_not(of_any_network(to_blame))
        return ops.logical_and(overflow, ops.logical_or(to_blame, none_is))


class AskOfCall(nn.Cell):
    """
    The verdict on one call of a window.

    Args:
        ask (Union[Ask, AskEach]): The detector.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the call.
        - **overflows** (tuple[Tensor]) - What else tells of an overflow of the call, bools of shape :math:`()`.
        - **earlier** (tuple[Tensor]) - Verdicts that there are already.

    Outputs:
        Tensor, bool, as that of `ask`.
    """

    def __init__(self, ask):
        super().__init__(auto_prefix=False)
        self.ask = ask

    def construct(self, grads, overflows, earlier):
        return any_of(self.ask(grads, overflows)[0], earlier)


class KnownOfCall(nn.Cell):
    """The verdict on one call of a window that was judged before. Inputs and outputs as those of :class:`AskOfCall`."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, grads, overflows, earlier):
        return any_of(earlier[0], earlier[1:])


class DetectorVerdict(nn.Cell):
    """
    The overflow detector decides.

    Args:
        clipping (Clipping): Measures the gradients before the verdict.
        ask (Union[Ask, AskEach]): What asks it.
        ranks (Union[Alone, Ranks]): Who must agree.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients, times `divisor`.
        - **divisor** (Tensor) - What they are still to be divided by.
        - **overflows** (tuple[Tensor]) - What else tells of an overflow, bools of shape :math:`()`.
        - **earlier** (tuple[Tensor]) - Verdicts on calls of this step that there are already.

    Outputs as those of `ask`.
    """

    def __init__(self, clipping, ask, ranks):
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.ask = ask
        self.ranks = ranks

    def construct(self, grads, divisor, overflows, earlier):
        self.clipping.measure(grads, divisor)
        overflow, flags = self.ask(grads, overflows)
        return self.ranks.agree(any_of(overflow, earlier)), flags


class NormVerdict(nn.Cell):
    """
    The norms decide, which are measured anyhow, and are finite whenever the gradients are.

    Args:
        clipping (Clipping): Measures the gradients.
        ranks (Union[Alone, Ranks]): Who must agree.
        blame (Cell): Whose overflow it was.

    Inputs and outputs as those of :class:`DetectorVerdict`.
    """

    def __init__(self, clipping, ranks, blame):
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.ranks = ranks
        self.blame = blame

    def construct(self, grads, divisor, overflows, earlier):
        not_finite = ()
        for is_finite in self.clipping.measure(grads, divisor):
            not_finite += (ops.logical_not(is_finite),)
        return self.ranks.agree(any_of(self.blame.of_each(not_finite, overflows), earlier)), ()


class KnownVerdict(nn.Cell):
    """The try that is taken was judged before. Inputs and outputs as those of :class:`DetectorVerdict`."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, grads, divisor, overflows, earlier):
        return earlier[0], ()


class NoVerdict(nn.Cell):
    """No step overflows. Args, inputs and outputs as those of :class:`DetectorVerdict`."""

    def __init__(self, clipping, overflow_detector):
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.overflow_detector = overflow_detector

    def construct(self, grads, divisor, overflows, earlier):
        self.clipping.measure(grads, divisor)
        return self.overflow_detector(grads), ()


def make_verdict(checks, overflow_detector, clipping, ranks, packing, blame):
    """The verdict that a step needs."""
    if not checks:
        return NoVerdict(clipping, overflow_detector)
    if clipping.tells and asks_gradients_only(overflow_detector):
        return NormVerdict(clipping, ranks, blame)
    return DetectorVerdict(clipping, make_ask(overflow_detector, packing, blame), ranks)


def asks_gradients_only(overflow_detector):
    """Whether norms can stand in for it. A user's own detector is asked, also one derived from FiniteGradients."""
    return type(overflow_detector) is FiniteGradients
