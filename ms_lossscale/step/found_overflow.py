"""
Finds whether a step overflowed: one answer over all gradients of all its networks.

If each network has its own loss scale, the answer is of shape (N,) and tells whose gradients overflowed. The subclasses
of FoundOverflow ask a detector, or check each gradient, or the norms.
"""

from typing import Optional, Union

import numpy as np
from mindspore import Tensor, get_context, nn

from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale.overflow_detector import FiniteGradients, OverflowDetector
from ms_lossscale.step.own_answer import as_flag
from ms_lossscale.step.packing import Packing


class FoundOverflow(nn.Cell):
    """
    Base class of the stages that find an overflow in gradients. A subclass defines `construct`.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **norms_finite** (tuple[Tensor]) - For each network with a norm, whether it is finite.
        - **of_state** (tuple[Tensor]) - Whether what the forward wrote overflowed, bools of shape :math:`()`.

    Outputs:
        Tuple of two: whether an overflow was found; and a tuple with the flags of :class:`Packing`, empty if
        they were not computed.
    """

    def __init__(self, whose: Union["WhoseGradients", "WhoseNorms", None]) -> None:
        super().__init__(auto_prefix=False)
        # None if all networks share a loss scale: then it does not matter whose gradients overflowed.
        self.whose = whose


def _answer(whose, found, grads, flags, of_state):
    """Returns whether an overflow was found. `found` is what was found in gradients, bools of shape ()."""
    return any_of(found + of_state) if whose is None else whose(found, grads, flags, of_state)


class FoundByDetector(FoundOverflow):
    """Asks an overflow detector."""

    def __init__(self, whose: Optional["WhoseGradients"], detect: nn.Cell) -> None:
        super().__init__(whose)
        self.detect = detect

    def construct(self, grads, norms_finite, of_state):
        return _answer(self.whose, (self.detect(grads),), grads, (), of_state), ()


class FoundInGradients(FoundOverflow):
    """Checks each gradient, as :class:`FiniteGradients` does on CPU."""

    def __init__(self, whose: Optional["WhoseGradients"], packing: Packing) -> None:
        super().__init__(whose)
        self.packing = packing

    def construct(self, grads, norms_finite, of_state):
        are_finite = self.packing.check(grads)
        found = (prim.logical_not(prim.reduce_all(are_finite, ())),)
        return _answer(self.whose, found, grads, (are_finite,), of_state), (are_finite,)


class FoundByNorms(FoundOverflow):
    """Checks the norms of all networks: they are measured anyway, and finite if and only if the gradients are."""

    def construct(self, grads, norms_finite, of_state):
        found = ()
        for is_finite in norms_finite:
            found += (prim.logical_not(is_finite),)
        return _answer(self.whose, found, grads, (), of_state), ()


class WhoseGradients(nn.Cell):
    """
    Tells whose gradients are not finite, in a step that overflowed: a bool Tensor of shape :math:`(N,)`. If all
    gradients are finite, something else showed the overflow, and all networks count.
    """

    def __init__(self, packing: Packing) -> None:
        super().__init__(auto_prefix=False)
        self.packing = packing
        networks = np.array(packing.networks_of_flags())
        self._whose = Tensor(networks == np.unique(networks)[:, None])
        self._all = Tensor(np.ones(len(networks), bool))

    def construct(self, found, grads, flags, of_state):
        overflow = any_of(found + of_state)
        if flags:
            are_finite = flags[0]
        else:
            are_finite = self._all
            if overflow:
                are_finite = self.packing.each_finite(grads)
        are_not_finite = prim.logical_and(prim.logical_not(are_finite), self._whose)
        return _or_all(prim.reduce_any(are_not_finite, 1), overflow)


class WhoseNorms(nn.Cell):
    """Tells the same if each network was checked separately."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, found, grads, flags, of_state):
        overflowed = prim.stack(found)
        return _or_all(overflowed, any_of((of_any_network(overflowed),) + of_state))


def _or_all(overflowed, overflow):
    none_did = prim.logical_not(of_any_network(overflowed))
    return prim.logical_and(overflow, prim.logical_or(overflowed, none_did))


class OwnDetector(nn.Cell):
    """Calls a user's own overflow detector, which may answer in another shape or dtype, or not with a Tensor."""

    def __init__(self, overflow_detector: OverflowDetector) -> None:
        super().__init__(auto_prefix=False)
        name = type(overflow_detector).__name__
        self.overflow_detector = overflow_detector
        self._not_one_answer = (
            f"For '{name}', 'construct' must return one answer over all gradients, a bool Tensor of shape (), but it "
            f"returned something else. Reduce an answer for each element with .any(); make a Tensor of a Python bool."
        )

    def construct(self, grads):
        return as_flag(self.overflow_detector(grads), self._not_one_answer)


def make_found_overflow(overflow_detector, packing, tells_whose, norms_suffice):
    """Chooses the cheapest way to find what the detector would; `tells_whose` if each network has its own scale."""
    # Another check never replaces that of a user, even if it is a FiniteGradients.
    asks_gradients_only = type(overflow_detector) is FiniteGradients
    if asks_gradients_only and norms_suffice:
        return FoundByNorms(WhoseNorms() if tells_whose else None)
    whose = WhoseGradients(packing) if tells_whose else None
    if asks_gradients_only and packing.checks and get_context("device_target") == "CPU":
        return FoundInGradients(whose, packing)
    is_own = type(overflow_detector).__module__ != OverflowDetector.__module__
    return FoundByDetector(whose, OwnDetector(overflow_detector) if is_own else overflow_detector)
