"""Runs the networks of a call: once, or again at a lower scale as long as that may help against an overflow."""

from typing import Any, Optional, Union

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import Compiled
from ms_lossscale.step.accumulation import CycleState
from ms_lossscale.step.forward_backward import ForwardsAndBackwards
from ms_lossscale.step.found_overflow import FoundOverflow
from ms_lossscale.step.returned import of_each_tensor, tensors_in, with_tensors
from ms_lossscale.step.scaling import Scaling, Unscale, UnscaleInClipping
from ms_lossscale.step.stage import Alone, Clipping, ForwardState, Stage
from ms_lossscale.step.update import StepCounters


class GradientCheck(Stage):
    """
    Checks the gradients of one run of the networks. Returns the gradients, what they still have to be divided by, other
    signs of an overflow, and whether an overflow was found.
    """

    forward_state: ForwardState
    unscale: Union[Unscale, UnscaleInClipping]
    complete: nn.Cell
    clipping: Clipping
    found_overflow: FoundOverflow

    def construct(self, grads, scale, saved):
        others = self.forward_state.overflowed(saved)
        grads, divisor = self.unscale(grads, scale)
        grads = self.complete(grads)
        norms_finite = self.clipping.measure(grads, divisor)
        return grads, divisor, others, self.found_overflow(grads, norms_finite, others, ())[0]


class AttemptCheck(Stage):
    """
    Checks an attempt: whether it overflowed, and whether another attempt may succeed.

    `unscaled_losses` are the losses that no scale takes part in, so that a lower one can't make them finite.
    """

    check: GradientCheck
    ranks: Alone
    scaling: Scaling
    cycle_state: Optional[CycleState]
    unscaled_losses: tuple[int, ...]

    def construct(self, losses, grads, scale, saved):
        grads, divisor, others, overflow = self.check(grads, scale, saved)
        can_mend = self.scaling.can_mend(scale, overflow)
        hopeless = any_of((ops.logical_not(can_mend),) + others)
        for i in self.unscaled_losses:
            hopeless = ops.logical_or(hopeless, ops.logical_not(gradients.finite((losses[i],))))
        if self.cycle_state is not None:
            # The cycle is lost already.
            hopeless = ops.logical_or(hopeless, of_any_network(self.cycle_state.overflow))
        again = ops.logical_and(can_mend, ops.logical_not(self.ranks.agree(hopeless)))
        return grads, divisor, overflow, again


class CopyOfInputs(Stage):
    """Copies the inputs, for networks that may write to them."""

    def construct(self, inputs):
        return of_each_tensor(gradients.copy, inputs)


class Attempts(Stage):
    """
    Runs the networks until they do not overflow, as long as a lower scale can help and retries are left. Inputs and
    outputs are those of :class:`ForwardsAndBackwards`, which is one attempt.

    Between two attempts, what the forward wrote is restored, and the update rule of the scale takes its step for an
    overflow. If no attempt succeeds, the rule returns to its state before the first one: the step counts as one
    overflow, that of the first attempt. Of several scales, only those whose gradients overflowed move.
    """

    attempt: ForwardsAndBackwards
    check: Union[AttemptCheck, Compiled]
    scaling: Scaling
    forward_state: ForwardState
    step_counters: StepCounters
    keep: Union[CopyOfInputs, nn.Identity]

    def __init__(self, max_retries: int, **stages: Any) -> None:
        super().__init__(**stages)
        self.rule_state = self.scaling.parameters
        self._retries = Tensor(max_retries, mstype.int32)
        self._none, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)

    def construct(self, scale, inputs, saved):
        # The call of the networks is written twice: MindSpore can't compile a method with it that is called twice.
        rule_state, scale_of_rule, used = gradients.copy(self.rule_state), scale, scale
        # Indexed rather than unpacked: graph mode warns about unused names.
        kept = self.keep(inputs)
        tried = self.attempt(scale, ops.depend(inputs, kept), saved)
        losses, auxes = tried[0], tried[1]
        grads, divisor, overflow, again = self.check(losses, tried[2][0], scale, saved)
        # One flat tuple in the loop, where graph mode forgets the length of a tuple of equal tensors.
        first, first_overflow = (losses, auxes, grads), overflow
        tensors, left = tensors_in(first), self._retries
        while ops.logical_and(again, left > self._none):
            left = left - self._one
            rolled_back = self._roll_back(used, overflow, saved)
            used = ops.depend(self.scaling.read(), rolled_back)
            tried = self.attempt(used, self.keep(ops.depend(kept, used)), saved)
            grads, divisor, overflow, again = self.check(tried[0], tried[2][0], used, saved)
            tensors = tensors_in((tried[0], tried[1], grads))
            ends = ops.logical_not(ops.logical_and(again, left > self._none))
            failed = ops.logical_and(of_any_network(overflow), ends)
            gradients.assign_where(failed, self.rule_state, rule_state)
            scale_of_rule = ops.select(failed, scale, used)
            overflow = ops.select(failed, first_overflow, overflow)
        losses, auxes, grads = with_tensors(first, tensors)
        return losses, auxes, (grads, divisor, scale_of_rule, overflow), used

    def _roll_back(self, scale, overflow, saved):
        self.forward_state.restore_call(saved)
        self.scaling.back_off(scale, overflow)
        return self.step_counters.count_retry()


class Trial(Stage):
    """
    Runs a batch forward and backward at the present loss scale. It is the first half of a step, made of the same
    stages. It undoes the side effects of the forward, and updates nothing.

    Returns whether an overflow was found, and a tuple with, for each optimizer, whether any gradient is not zero.
    """

    scaling: Scaling
    forward_state: ForwardState
    attempt: ForwardsAndBackwards
    check: Union[GradientCheck, Compiled]
    keep: Union[CopyOfInputs, nn.Identity]

    def __init__(self, **stages: Any) -> None:
        super().__init__(**stages)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self, *inputs):
        inputs, saved = self.forward_state.save(self.keep(self.use_parameters(inputs)))
        scale = self.scaling.read()
        # Indexed rather than unpacked: graph mode warns about unused names.
        backward = self.attempt(scale, inputs, saved)[2]
        overflow = self.check(*backward, saved)[3]
        self.forward_state.restore_call(saved)
        return overflow, self.attempt.packing.any_nonzero(backward[0])
