"""
Whether an overflow was found: one answer over all gradients of all networks of a step, agreed across ranks.

Where each network has a loss scale of its own it is of shape (N,): whose gradients overflowed. What looks at the
gradients is a subclass of FoundOverflow: the detector, each gradient, or the norms.
"""

from typing import Union

import numpy as np
from mindspore import Tensor, get_context, nn, ops
from mindspore import dtype as mstype

from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale.overflow_detector import FiniteGradients, OverflowDetector
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.stage import Alone, Stage


class FoundOverflow(Stage):
    """
    Base class of what looks at gradients, and tells whether an overflow was found in them: `construct`.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **norms_finite** (tuple[Tensor]) - For each network with a norm whether it is finite.
        - **others** (tuple[Tensor]) - What else shows an overflow, bools of shape :math:`()`.
        - **known** (tuple[Tensor]) - What was found in this step before, as outputs of this kind.

    Outputs:
        Tuple of two: whether an overflow was found; and a tuple of the flags of :class:`Packing` if they became known
        with it, else empty.
    """

    ranks: Alone
    # None where all networks share a loss scale, and whose gradients overflowed does not matter.
    whose: Union["WhoseGradients", "WhoseNorms", None]

    def agreed(self, found, grads, flags, others, known):
        """The outputs, given what was found, a tuple of bools of shape ()."""
        overflow = any_of(found + others) if self.whose is None else self.whose(found, grads, flags, others)
        return self.ranks.agree(any_of((overflow,) + known)), flags


class FoundByDetector(FoundOverflow):
    """Asks an overflow detector."""

    detect: nn.Cell

    def construct(self, grads, norms_finite, others, known):
        return self.agreed((self.detect(grads),), grads, (), others, known)


class FoundInGradients(FoundOverflow):
    """Looks at each gradient, in the place of :class:`FiniteGradients` on CPU."""

    packing: Packing

    def construct(self, grads, norms_finite, others, known):
        are_finite = self.packing.check(grads)
        found = (ops.logical_not(ops.ReduceAll()(are_finite)),)
        return self.agreed(found, grads, (are_finite,), others, known)


class FoundByNorms(FoundOverflow):
    """Looks at the norms of all networks, which are measured anyhow, and are finite whenever the gradients are."""

    def construct(self, grads, norms_finite, others, known):
        found = ()
        for is_finite in norms_finite:
            found += (ops.logical_not(is_finite),)
        return self.agreed(found, grads, (), others, known)


class KnownOverflow(Stage):
    """All is known that can be found. Inputs and outputs as those of :class:`FoundOverflow`."""

    def construct(self, grads, norms_finite, others, known):
        return any_of(known), ()


class WhoseGradients(nn.Cell):
    """
    Of the networks of a step that overflowed those whose gradients are not finite. If all gradients are finite it is
    all of them: something else showed the overflow. Gives a bool Tensor of shape :math:`(N,)`.
    """

    def __init__(self, packing: Packing) -> None:
        super().__init__(auto_prefix=False)
        self.packing = packing
        networks = np.array(packing.networks_of_flags())
        self._whose = Tensor(networks == np.unique(networks)[:, None])
        self._all = Tensor(np.ones(len(networks), bool))

    def construct(self, found, grads, flags, others):
        overflow = any_of(found + others)
        if flags:
            are_finite = flags[0]
        else:
            are_finite = self._all
            if overflow:
                are_finite = self.packing.each_finite(grads)
        are_not_finite = ops.logical_and(ops.logical_not(are_finite), self._whose)
        return _or_all(ops.ReduceAny()(are_not_finite, 1), overflow)


class WhoseNorms(Stage):
    """The same where it was found of each network by itself."""

    def construct(self, found, grads, flags, others):
        overflowed = ops.stack(found)
        return _or_all(overflowed, any_of((of_any_network(overflowed),) + others))


def _or_all(overflowed, overflow):
    none_did = ops.logical_not(of_any_network(overflowed))
    return ops.logical_and(overflow, ops.logical_or(overflowed, none_did))


class OwnDetector(nn.Cell):
    """A user's own overflow detector, which may answer in another shape or dtype, or not at all."""

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


def make_found_overflow(overflow_detector, ranks, packing, tells_whose, norms_suffice):
    """The cheapest that finds what the detector would; `tells_whose` where each network has its own loss scale."""
    if asks_gradients_only(overflow_detector):
        if norms_suffice:
            return FoundByNorms(ranks=ranks, whose=WhoseNorms() if tells_whose else None)
        if packing.checks and get_context("device_target") == "CPU":
            return FoundInGradients(
                ranks=ranks, whose=WhoseGradients(packing) if tells_whose else None, packing=packing
            )
    is_own = type(overflow_detector).__module__ != OverflowDetector.__module__
    return FoundByDetector(
        ranks=ranks,
        whose=WhoseGradients(packing) if tells_whose else None,
        detect=OwnDetector(overflow_detector) if is_own else overflow_detector,
    )


def asks_gradients_only(overflow_detector):
    """Whether something else can stand in for it. A user's own is asked, also one derived from FiniteGradients."""
    return type(overflow_detector) is FiniteGradients
