"""
Whether an overflow was found: one answer over all gradients of all networks of a step, agreed across ranks.

Where each network has a loss scale of its own it is of shape (N,): whose gradients overflowed. All of it is one cell,
FoundOverflow, made of what looks at the gradients (a detector, each gradient, or the norms) and of whose they are.
"""

from typing import Union

import numpy as np
from mindspore import Tensor, get_context, nn, ops
from mindspore import dtype as mstype

from ms_lossscale.overflow_detector import FiniteGradients, OverflowDetector
from ms_lossscale.step.clipping import AnyClipping
from ms_lossscale.step.of_network import any_of, of_any_network
from ms_lossscale.step.packing import AnyPacking
from ms_lossscale.step.ranks import AnyRanks


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

    def __init__(self, overflow_detector: OverflowDetector) -> None:
        super().__init__(auto_prefix=False)
        name = type(overflow_detector).__name__
        if type(overflow_detector).construct is OverflowDetector.construct:
            raise TypeError(
                f"For '{name}', an overflow detector must define 'construct(self, grads)', but it does not. It gets a "
                f"tuple of gradients and returns whether they overflowed, a bool Tensor of shape ()."
            )
        self.overflow_detector = overflow_detector
        self._not_one_answer = (
            f"For '{name}', 'construct' must return one answer over all gradients, a bool Tensor of shape (), but it "
            f"returned something else. Reduce an answer for each element with .any(); make a Tensor of a Python bool."
        )

    def construct(self, grads):
        overflow = self.overflow_detector(grads)
        if not isinstance(overflow, Tensor):
            raise TypeError(self._not_one_answer)
        if overflow.shape != ():
            if overflow.size != 1:
                raise ValueError(self._not_one_answer)
            overflow = overflow.reshape(())
        if overflow.dtype != mstype.bool_:
            overflow = overflow.astype(mstype.bool_)
        return overflow


class Detector(nn.Cell):
    """
    Asks an overflow detector.

    Args:
        overflow_detector (OverflowDetector): What is asked.
        whose (Cell): Whose gradients overflowed.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **norms_finite** (tuple[Tensor]) - For each network with a norm whether it is finite.
        - **others** (tuple[Tensor]) - What else shows an overflow, bools of shape :math:`()`.

    Outputs:
        Tuple of two: whether an overflow was found, as `whose` says it; and a tuple of the flags of :class:`Packing`
        if they became known with it, else empty.
    """

    def __init__(self, overflow_detector: OverflowDetector, whose: "Whose") -> None:
        super().__init__(auto_prefix=False)
        is_own = type(overflow_detector).__module__ != OverflowDetector.__module__
        self.detect = OwnDetector(overflow_detector) if is_own else overflow_detector
        self.whose = whose

    def construct(self, grads, norms_finite, others):
        return self.whose(any_of(self.detect(grads), others), grads, ()), ()


class EachGradient(nn.Cell):
    """
    Looks at each gradient, in the place of :class:`FiniteGradients` on CPU.

    Args:
        packing (Packing): Checks them.
        whose (Cell): Whose gradients overflowed.

    Inputs and outputs as those of :class:`Detector`.
    """

    def __init__(self, packing: AnyPacking, whose: "Whose") -> None:
        super().__init__(auto_prefix=False)
        self.packing = packing
        self.whose = whose

    def construct(self, grads, norms_finite, others):
        are_finite = self.packing.check(grads)
        overflow = any_of(ops.logical_not(ops.ReduceAll()(are_finite)), others)
        return self.whose(overflow, grads, (are_finite,)), (are_finite,)


class Norms(nn.Cell):
    """
    Looks at the norms, which are measured anyhow, and are finite whenever the gradients are.

    Args:
        whose (Cell): Whose gradients overflowed.

    Inputs and outputs as those of :class:`Detector`.
    """

    def __init__(self, whose: "Whose") -> None:
        super().__init__(auto_prefix=False)
        self.whose = whose

    def construct(self, grads, norms_finite, others):
        not_finite = ()
        for is_finite in norms_finite:
            not_finite += (ops.logical_not(is_finite),)
        return self.whose.of_each(not_finite, others), ()


class OfAll(nn.Cell):
    """
    All networks share a loss scale: whose gradients overflowed does not matter.

    Inputs:
        - **overflow** (Tensor) - Whether the step overflowed, bool of shape :math:`()`.
        - **grads** (tuple[Tensor]) - The gradients.
        - **flags** (tuple[Tensor]) - Which of them are finite, if that is known.

    Outputs:
        Tensor, the same.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, overflow, grads, flags):
        return overflow

    def of_each(self, not_finite, others):
        """The same where it is known of each network whether its gradients are not finite, as a tuple."""
        return any_of(not_finite[0], (*not_finite[1:], *others))


class OfEach(nn.Cell):
    """
    Each network has a loss scale of its own: in a step that overflowed, it is those whose gradients are not finite. If
    all gradients are finite it is all of them: something else showed the overflow.

    Args:
        packing (Packing): Knows of each gradient whether it is finite.

    Inputs as those of :class:`OfAll`.

    Outputs:
        Tensor, bool of shape :math:`(N,)`, of which none is True unless the step overflowed.
    """

    def __init__(self, packing: AnyPacking) -> None:
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

    def of_each(self, not_finite, others):
        overflowed = ops.stack(not_finite)
        return self._or_all(overflowed, any_of(of_any_network(overflowed), others))

    @staticmethod
    def _or_all(overflowed, overflow):
        none_did = ops.logical_not(of_any_network(overflowed))
        return ops.logical_and(overflow, ops.logical_or(overflowed, none_did))


Whose = Union[OfAll, OfEach]


class FoundOverflow(nn.Cell):
    """
    Whether an overflow was found in gradients.

    Args:
        clipping (Clipping): Measures them first.
        looks (Union[Detector, EachGradient, Norms]): What looks at them.
        ranks (Union[Alone, Ranks]): Who must agree.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients, times `divisor`.
        - **divisor** (Tensor) - What they are still to be divided by.
        - **others** (tuple[Tensor]) - What else shows an overflow, bools of shape :math:`()`.
        - **known** (tuple[Tensor]) - What was found in this step before, as outputs of this kind.

    Outputs as those of `looks`.
    """

    def __init__(self, clipping: AnyClipping, looks: Union[Detector, EachGradient, Norms], ranks: AnyRanks) -> None:
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.looks = looks
        self.ranks = ranks

    def construct(self, grads, divisor, others, known):
        norms_finite = self.clipping.measure(grads, divisor)
        overflow, flags = self.looks(grads, norms_finite, others)
        return self.ranks.agree(any_of(overflow, known)), flags


class KnownOverflow(nn.Cell):
    """All is known that can be found. Inputs and outputs as those of :class:`FoundOverflow`."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, grads, divisor, others, known):
        return any_of(known[0], known[1:]), ()


AnyFoundOverflow = Union[FoundOverflow, KnownOverflow]


def make_looks(overflow_detector, packing, whose, norms_suffice=False):
    """What looks at the gradients: the cheapest that finds what the detector would."""
    if asks_gradients_only(overflow_detector):
        if norms_suffice:
            return Norms(whose)
        if packing.checks and get_context("device_target") == "CPU":
            return EachGradient(packing, whose)
    return Detector(overflow_detector, whose)


def asks_gradients_only(overflow_detector):
    """Whether something else can stand in for it. A user's own is asked, also one derived from FiniteGradients."""
    return type(overflow_detector) is FiniteGradients
