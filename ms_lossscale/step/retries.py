"""A step that runs its networks again at a lower scale, as long as that may help against an overflow."""

from typing import Any, Optional, Union

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale._mindspore import Compiled
from ms_lossscale.step.check_of_call import CheckOfCall
from ms_lossscale.step.cycle import Accumulation
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.kept_inputs import KeptInputs
from ms_lossscale.step.returned import tensors_in, with_tensors
from ms_lossscale.step.scaling import Scaling
from ms_lossscale.step.stage import Alone
from ms_lossscale.step.step import Decision, Step


class RetriedStep(Step):
    """
    Runs the networks until they do not overflow, as long as a lower scale can help and retries are left. As `end`, it
    has an EndOfRetriedStep, or an EndOfRetriedCall in accumulation cycles.

    Between two attempts, what the forward wrote is restored, and the update rule of the scale takes its step for an
    overflow. If no attempt succeeds, the rule returns to its state before the first one: the step counts as one
    overflow, that of the first attempt. Of several scales, only those whose gradients overflowed move.
    """

    def __init__(
        self, max_retries: int, check_attempt: Union["AttemptCheck", Compiled], keep: KeptInputs, **stages: Any
    ) -> None:
        super().__init__(**stages)
        self.check_attempt = check_attempt
        self.keep = keep
        self.step_counters = self.update.step_counters
        self.rule_state = self.scaling.parameters
        self._has_aux = self.forwards_and_backwards.has_aux
        self._retries = Tensor(max_retries, mstype.int32)
        self._none, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)

    def construct(self, *inputs):
        scale, inputs, saved = self.begin(inputs)
        # The call of the networks is written twice: MindSpore can't compile a method with it that is called twice.
        rule_state, scale_of_rule, used = gradients.copy(self.rule_state), scale, scale
        kept = self.keep(inputs)
        losses, auxes, grads, weights = self.forwards_and_backwards(scale, ops.depend(inputs, kept))
        # Without empty tuples, which graph mode can't pass to, or from, what is called twice.
        checked = self.check_attempt(losses, grads, scale, saved, *weights)
        grads, overflow, again, of_state = checked[0], checked[1], checked[2], checked[3:]
        # One flat tuple in the loop, where graph mode forgets the length of a tuple of equal tensors: the bool differs.
        # It is the last one: if it were the first, MindSpore would never free the training cell.
        first_overflow, left = overflow, self._retries
        last = losses + grads + weights + (tensors_in(auxes) if self._has_aux else ()) + (overflow,)
        while prim.logical_and(again, left > self._none):
            left = left - self._one
            rolled_back = self._roll_back(used, overflow, saved)
            used = ops.depend(self.scaling.read(), rolled_back)
            # Indexed rather than unpacked: graph mode warns about unused names.
            tried = self.forwards_and_backwards(used, self.keep(ops.depend(kept, used)))
            checked = self.check_attempt(tried[0], tried[2], used, saved, *tried[3])
            overflow, again = checked[1], checked[2]
            of_aux = tensors_in(tried[1]) if self._has_aux else ()
            last = tried[0] + checked[0] + tried[3] + of_aux + (overflow,)
            ends = prim.logical_not(prim.logical_and(again, left > self._none))
            failed = prim.logical_and(of_any_network(overflow), ends)
            gradients.assign_where(failed, self.rule_state, rule_state)
            scale_of_rule = prim.select(failed, scale, used)
            overflow = prim.select(failed, first_overflow, overflow)
        at = len(losses)
        last_losses, last_grads, others = last[:at], last[at : at + len(grads)], last[at + len(grads) :]
        last_weights, last_aux = others[: len(weights)], others[len(weights) :]
        overflow = self.end(last_grads, overflow, last_losses, last_weights, losses, of_state, scale_of_rule, saved)
        return last_losses, with_tensors(auxes, last_aux) if self._has_aux else auxes, overflow, used

    def _roll_back(self, scale, overflow, saved):
        self.scaling.back_off(scale, overflow)
        # As in Undo: there may be nothing to restore.
        return ops.depend(self.step_counters.count_retry(), self.forward_state.restore_call(saved))


class AttemptCheck(nn.Cell):
    """
    Checks an attempt. Returns the gradients, whether it overflowed, whether another attempt may succeed, and, if the
    forward writes anything, whether that overflowed.

    `unscaled_losses` are the losses that no scale takes part in, so that a lower one can't make them finite.
    """

    def __init__(
        self,
        check_of_call: CheckOfCall,
        ranks: Alone,
        scaling: Scaling,
        cycle_state: Optional[CycleState],
        unscaled_losses: tuple[int, ...],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.check_of_call = check_of_call
        self.ranks = ranks
        self.scaling = scaling
        self.cycle_state = cycle_state
        self._unscaled_losses = unscaled_losses

    def construct(self, losses, grads, scale, saved, *weights):
        grads, overflow, of_state = self.check_of_call(grads, weights, scale, saved)
        can_mend = self.scaling.can_mend(scale, overflow)
        hopeless = any_of((prim.logical_not(can_mend),) + of_state)
        for i in self._unscaled_losses:
            hopeless = prim.logical_or(hopeless, prim.logical_not(gradients.finite((losses[i],))))
        if self.cycle_state is not None:
            # The cycle is lost already.
            hopeless = prim.logical_or(hopeless, of_any_network(self.cycle_state.overflow))
        again = prim.logical_and(can_mend, prim.logical_not(self.ranks.agree(hopeless)))
        return (grads, overflow, again) + of_state


class EndOfRetriedStep(nn.Cell):
    """Ends a step that is one call, which its attempts have checked. Inputs as in :class:`EndOfRetriedCall`."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(auto_prefix=False)
        self.decision = decision

    def construct(self, grads, overflow, losses, weights, first_losses, of_state, scale, saved):
        # They are float32 already. In nested branches, compiled code takes passed tensors for numbers.
        grads = gradients.to_float32(grads)
        return self.decision(grads, overflow, (), losses, (first_losses, of_state, ()), scale, saved)


class EndOfRetriedCall(nn.Cell):
    """
    Ends a call of a cycle, which its attempts have checked.

    Inputs:
        - **grads**, **losses**, **weights** (tuple[Tensor]) - Those of the last attempt, unscaled.
        - **overflow** (Tensor) - Whether it overflowed; if all did, what the first one's answer was.
        - **first_losses**, **of_state** (tuple[Tensor]) - Of the first attempt: where an overflow may have come from.
          They are not in one tuple, since PyNative mode can't pass nested ones to compiled code.
        - **scale**, **saved** - As for :class:`Decision`.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        super().__init__(auto_prefix=False)
        self.accumulation = accumulation

    def construct(self, grads, overflow, losses, weights, first_losses, of_state, scale, saved):
        origin = first_losses, of_state, (overflow,)
        return self.accumulation(grads, (), (overflow,), losses, weights, origin, scale, saved)
