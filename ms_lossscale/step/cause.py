"""What an overflow came from: the forward itself, which no lower scale mends, or the backward."""

from typing import NamedTuple, Optional

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale.step.stage import Alone


class PatientScales(NamedTuple):
    """
    Which loss scales stand still if the forward itself was not finite.

    Attributes:
        losses (numpy.ndarray): For each scale, which losses tell of it, bool of shape (scales, losses).
        state (numpy.ndarray): For each scale, whether what the forward wrote tells of it, bool.
        shape (tuple[int, ...]): The shape of the loss scale.
        ranks_of_call (Alone): The ranks that agree about each call of a cycle.
    """

    losses: np.ndarray
    state: np.ndarray
    shape: tuple[int, ...]
    ranks_of_call: Alone


class Cause(nn.Cell):
    """
    Tells what an overflow came from, if each call is a step. `losses` is their number, and all `ranks` agree on it.
    `patient` is None if no loss scale stands still because of it.
    """

    def __init__(self, losses: int, ranks: Alone, patient: Optional[PatientScales]) -> None:
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self._no = Tensor(False)
        self.is_asked = patient is not None
        if patient is not None:
            self._finite = Tensor(np.zeros(losses, bool))
            self._of_losses, self._of_state = Tensor(patient.losses), Tensor(patient.state)
            self._has_one_scale = patient.shape == ()
            self.ranks_of_call = patient.ranks_of_call

    def of_step(self, losses, of_state):
        """
        Returns whether a loss was not finite, and whether what the forward wrote became so, bools of shape :math:`()`,
        and ends the step. A ManualStep may have no losses.
        """
        loss, state = self._of_call(losses, of_state)
        return self.ranks.agree_on_both(loss, state)

    def _of_call(self, losses, of_state):
        loss = self._no
        if len(losses) > 0:
            loss = prim.logical_not(prim.reduce_all(gradients.each_finite(losses), ()))
        return loss, any_of(of_state) if len(of_state) > 0 else self._no

    def stands_still(self, overflow, losses, of_state, own):
        """
        Returns whether the loss scale stands still, a tuple of one flag in its shape; nothing if none ever does. `own`
        has, within a cycle, whether the last call itself overflowed, and what `of_call` returned.
        """
        if not self.is_asked:
            return ()
        of_forward = self._of_forward(losses, of_state, overflow)
        return (prim.logical_and(overflow, self.ranks.agree(of_forward)),)

    def _of_forward(self, losses, of_state, overflow):
        """
        Returns, in the shape of the loss scale, whether the forward of a call was not finite. Which network wrote what
        became so is not known. With scales of their own, it counts only if nothing else tells whose overflow it is: no
        loss, nor the gradients of some.
        """
        of_losses = prim.logical_not(gradients.each_finite(losses)) if len(losses) > 0 else self._finite
        of_state = any_of(of_state) if len(of_state) > 0 else self._no
        if overflow.ndim:
            untold = prim.logical_and(prim.reduce_all(overflow, ()), prim.logical_not(prim.reduce_any(of_losses, ())))
            of_state = prim.logical_and(of_state, untold)
        of_losses = prim.reduce_any(prim.logical_and(self._of_losses, of_losses), (1,))
        of_forward = prim.logical_or(of_losses, prim.logical_and(self._of_state, of_state))
        return of_forward.reshape(()) if self._has_one_scale else of_forward


class CycleCause(Cause):
    """
    Tells the same of an accumulation cycle. Its loss scale does not stand still if a call overflowed whose forward was
    finite.
    """

    def __init__(self, losses: int, ranks: Alone, patient: Optional[PatientScales], prefix: str) -> None:
        super().__init__(losses, ranks, patient)
        self.loss_not_finite = self._state(f"{prefix}accumulation.loss_not_finite", ())
        self.state_not_finite = self._state(f"{prefix}accumulation.state_not_finite", ())
        if patient is not None:
            self.forward_not_finite = self._state(f"{prefix}accumulation.forward_not_finite", patient.shape)
            self.backs_off = self._state(f"{prefix}accumulation.backs_off", patient.shape)
        self.flags = ParameterTuple(self.get_parameters())

    @staticmethod
    def _state(name, shape):
        return Parameter(Tensor(np.zeros(shape, bool)), name=name, requires_grad=False)

    def of_step(self, losses, of_state):
        loss, state = self._with_earlier(losses, of_state)
        # A tuple instead of one tensor would leave the flags as they are.
        gradients.assign_zeros(self.flags, prim.logical_or(loss, state))
        return self.ranks.agree_on_both(loss, state)

    def _with_earlier(self, losses, of_state):
        loss, state = self._of_call(losses, of_state)
        return prim.logical_or(self.loss_not_finite, loss), prim.logical_or(self.state_not_finite, state)

    def stands_still(self, overflow, losses, of_state, own):
        if not self.is_asked:
            return ()
        of_forward, backs_off = self._with_call(own)
        stands_still = prim.logical_and(self.ranks.agree(of_forward), prim.logical_not(self.ranks.agree(backs_off)))
        return (prim.logical_and(overflow, stands_still),)

    def of_call(self, losses, of_state, overflow):
        """
        Returns whether the forward of a call was not finite, given whether the call itself overflowed: a tuple of one
        flag in the shape of the loss scale, or none if it never stands still.
        """
        if not self.is_asked:
            return ()
        # Here rather than in `remember`, since not all ranks remember a call that only some of them lost.
        return (self.ranks_of_call.agree(self._of_forward(losses, of_state, overflow)),)

    def remember(self, losses, of_state, own):
        """Remembers a call that is not the last of its cycle, and overflowed."""
        loss, state = self._with_earlier(losses, of_state)
        if self.is_asked:
            of_forward, backs_off = self._with_call(own)
            prim.assign(self.forward_not_finite, of_forward)
            prim.assign(self.backs_off, backs_off)
        prim.assign(self.loss_not_finite, loss)
        prim.assign(self.state_not_finite, state)

    def _with_call(self, own):
        """
        Returns, with those remembered, whether the forward of this call was not finite, and whether it overflowed
        although it was.
        """
        of_forward, backs_off = self.forward_not_finite, self.backs_off
        if len(own) > 0:
            overflow, of_call = own
            of_forward = prim.logical_or(of_forward, of_call)
            backs_off = prim.logical_or(backs_off, prim.logical_and(overflow, prim.logical_not(of_call)))
        return of_forward, backs_off
