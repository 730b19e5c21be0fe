"""How often the networks run in a call: once, or again at a lower scale as long as that can mend an overflow."""

from typing import TYPE_CHECKING, Optional, Union

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import Compiled
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.forward_backward import ForwardsAndBackwards
from ms_lossscale.step.forward_state import AnyForwardState
from ms_lossscale.step.found_overflow import FoundOverflow
from ms_lossscale.step.gradient_transforms import Complete
from ms_lossscale.step.memory_in_use import MemoryInUse, PutMemoryBack
from ms_lossscale.step.nested import of_each_tensor, tensors_in, with_tensors
from ms_lossscale.step.of_network import any_of, of_any_network
from ms_lossscale.step.ranks import AnyRanks
from ms_lossscale.step.scaling import AnyScaling, AnyUnscale
from ms_lossscale.step.step_counters import StepCounters

if TYPE_CHECKING:
    from ms_lossscale.step.accumulation import CycleState


class Attempt(nn.Cell):
    """
    Runs the networks once.

    Args:
        overflow_detector (OverflowDetector): Clears an NPU's register before the forward.
        forwards_and_backwards (ForwardsAndBackwards): The networks.
        memory (MemoryInUse): Of what the forward may write.

    Inputs:
        - **scale** (Tensor) - The loss scale.
        - **inputs** (tuple) - The inputs of the networks.
        - **saved** (tuple[Tensor]) - What the forward writes, as it was before.

    Outputs:
        Tuple of four: the tuples of losses and of aux; what follows takes of the backward; the scale that was used.
    """

    def __init__(
        self, overflow_detector: OverflowDetector, forwards_and_backwards: ForwardsAndBackwards, memory: MemoryInUse
    ) -> None:
        super().__init__(auto_prefix=False)
        self.put_memory_back = PutMemoryBack(memory)
        self.overflow_detector = overflow_detector
        self.forwards_and_backwards = forwards_and_backwards

    def construct(self, scale, inputs, saved):
        inputs = self.overflow_detector.start(inputs)
        losses, auxes, grads = self.put_memory_back(self.forwards_and_backwards(scale, inputs))
        return losses, auxes, (grads, scale), scale


class GradientCheck(nn.Cell):
    """
    Checks the gradients of one run of the networks: whether they overflowed.

    Args:
        forward_state (Cell): Knows what the forward wrote.
        unscale (Cell): Divides the gradients.
        complete (Cell): Reduces and transforms the gradients, where each call is a step.
        found_overflow (FoundOverflow): Whether these gradients overflowed.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **scale** (Tensor) - The loss scale that they hold.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tuple of four: the gradients; what they are still to be divided by; what shows an overflow besides them; whether
        an overflow was found.
    """

    def __init__(
        self, forward_state: AnyForwardState, unscale: AnyUnscale, complete: Complete, found_overflow: FoundOverflow
    ) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.complete = complete
        self.found_overflow = found_overflow

    def construct(self, grads, scale, saved):
        others = self.forward_state.overflowed(saved)
        grads, divisor = self.unscale(grads, scale)
        grads = self.complete(grads)
        return grads, divisor, others, self.found_overflow(grads, divisor, others, ())[0]


class AttemptCheck(nn.Cell):
    """
    Checks an attempt: whether it overflowed, and whether the next one may not.

    Args:
        check (GradientCheck): Whether its gradients overflowed.
        ranks (Union[Alone, Ranks]): Who tries again together.
        scaling (Cell): Knows whether the scale can be lowered.
        cycle_state (CycleState): None where each call is a step.
        unscaled_losses (tuple[int]): Which losses no scale takes part in, so that a lower one can't make them finite.
    """

    def __init__(
        self,
        check: GradientCheck,
        ranks: AnyRanks,
        scaling: AnyScaling,
        cycle_state: Optional["CycleState"],
        unscaled_losses: tuple[int, ...],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.check = check
        self.ranks = ranks
        self.scaling = scaling
        self.cycle_state = cycle_state
        self._unscaled_losses = unscaled_losses

    def construct(self, losses, grads, scale, saved):
        grads, divisor, others, overflow = self.check(grads, scale, saved)
        can_mend = self.scaling.can_mend(scale, overflow)
        hopeless = any_of(ops.logical_not(can_mend), others)
        for i in self._unscaled_losses:
            hopeless = ops.logical_or(hopeless, ops.logical_not(gradients.finite((losses[i],))))
        if self.cycle_state is not None:
            # A lost cycle.
            hopeless = ops.logical_or(hopeless, of_any_network(self.cycle_state.overflow))
        again = ops.logical_and(can_mend, ops.logical_not(self.ranks.agree(hopeless)))
        return grads, divisor, overflow, again


class CopyOfInputs(nn.Cell):
    """The same inputs in memory of their own, for networks that may write into what they are called with."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, inputs):
        return of_each_tensor(gradients.copy, inputs)


class Attempts(nn.Cell):
    """
    Runs the networks until they do not overflow, as long as a lower scale can help.

    Between two attempts what the forward wrote is restored, and the update rule of the scale takes its step for an
    overflow. If no attempt succeeds, the rule is restored to its state before the first: it sees one overflow, that of
    the first. Of several scales only those whose gradients overflowed do so.

    Args:
        max_retries (int): How many attempts beyond the first there may be.
        attempt (Attempt): Runs the networks once.
        check (AttemptCheck): Whether to try again.
        scaling (Cell): The scale and its update rule.
        forward_state (Cell): What the forward wrote.
        step_counters (StepCounters): Count the retries.
        keep (Cell): Copies the inputs, if the networks may write into them.

    Inputs and outputs as those of :class:`Attempt`.
    """

    def __init__(
        self,
        max_retries: int,
        attempt: Attempt,
        check: Union[AttemptCheck, Compiled],
        scaling: AnyScaling,
        forward_state: AnyForwardState,
        step_counters: StepCounters,
        keep: Union[CopyOfInputs, nn.Identity],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.attempt = attempt
        self.check = check
        self.scaling = scaling
        self.forward_state = forward_state
        self.step_counters = step_counters
        self.keep = keep
        self.rule_state = scaling.parameters
        self._retries = Tensor(max_retries, mstype.int32)
        self._none, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)

    def construct(self, scale, inputs, saved):
        # The networks stand here twice, and in no method that is called twice: MindSpore fails to compile that.
        rule_state, scale_of_rule, used = gradients.copy(self.rule_state), scale, scale
        # Indexed rather than unpacked: graph mode warns about unused names.
        kept = self.keep(inputs)
        tried = self.attempt(scale, ops.depend(inputs, kept), saved)
        losses, auxes = tried[0], tried[1]
        grads, divisor, overflow, again = self.check(losses, tried[2][0], scale, saved)
        # Flat through the loop, in which graph mode forgets the length of a tuple of equal tensors.
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
