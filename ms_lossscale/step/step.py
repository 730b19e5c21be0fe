"""One training step as a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

from typing import Callable, Union

from mindspore import nn

from ms_lossscale._mindspore import Compiled
from ms_lossscale.step.accumulation import Accumulation, EveryCall, Flush
from ms_lossscale.step.attempts import Attempt, Attempts
from ms_lossscale.step.forward_state import AnyForwardState
from ms_lossscale.step.found_overflow import AnyFoundOverflow
from ms_lossscale.step.gradient_transforms import Complete
from ms_lossscale.step.scaling import AnyScaling, AnyUnscale
from ms_lossscale.step.trial import Trial
from ms_lossscale.step.update import AlwaysUpdate, Nothing, Update, UpdateOrUndo

AnyAccumulation = Union[EveryCall, Accumulation]


class Step(nn.Cell):
    """
    The order of events: 1 to 3 in `construct`, 4 and 5 in that of AfterBackward, 6 to 9 in that of Decision, below.
    The step is split in three because PyNative mode compiles from 4 on, and `flush()` enters at 6. With retries,
    `attempts.py` repeats 1 to 4 and, where each call is a step, 6 and 7.

    1. Read the scale once. 2. Copy what the forward will write. 3. Clear an NPU's register; forward and backward.
    4. Unscale. 5. Accumulate; all calls but the last of a cycle end here. 6. Reduce across ranks, and transform. 7. One
    overflow check. 8. One update of the scale. 9. One branch: update, or undo.

    What a training cell does without is a stage that does nothing, and one network is the case N = 1 of several:
    `build.py` chooses the stages.

    Args:
        scaling, forward_state, attempts, after_backward (Cell): The stages.
        attempt (Attempt): A run of the networks: a stage of `attempts`.
        accumulation (Cell): Which calls make a step: a stage of `after_backward`.
        flush_cycle (Cell): Ends a cycle that has begun.
        update (Update): What happens in a step that did not overflow: a stage of `accumulation`.
        make_trial (Callable): Makes a :class:`Trial` of the same stages.

    Inputs:
        - **\\*inputs** - The inputs of the networks.

    Outputs:
        Tuple of four: the tuples of losses and of aux, whether the step overflowed, and the scale that was used, of
        shape :math:`()`, or those of the networks, of shape :math:`(N,)`. Index the result rather
        than unpack it: graph mode warns about unused names.
    """

    def __init__(
        self,
        *,
        scaling: AnyScaling,
        forward_state: AnyForwardState,
        attempts: Union[Attempt, Attempts],
        attempt: Attempt,
        after_backward: Union["AfterBackward", "AfterAttempts", Compiled],
        accumulation: AnyAccumulation,
        flush_cycle: Union[Flush, Compiled, Nothing],
        update: Update,
        make_trial: Callable[[], Trial],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.scaling = scaling
        self.forward_state = forward_state
        self.attempts = attempts
        self.overflow_detector = attempt.overflow_detector
        self.forwards_and_backwards = attempt.forwards_and_backwards
        self.after_backward = after_backward
        self.accumulation = accumulation
        self.flush_cycle = flush_cycle
        self.loss_scales = scaling.loss_scales
        self.optimizers = update.optimizers
        self.clipping = update.clipping
        self.moving_averages = update.moving_averages
        self.step_counters = update.step_counters
        self.make_trial = make_trial

    def construct(self, *inputs):
        scale = self.scaling.read()  # 1. Read the scale once.
        inputs, saved = self.forward_state.save(inputs)  # 2. Copy what the forward will write.
        losses, auxes, backward, scale = self.attempts(scale, inputs, saved)  # 3. Forward and backward, once each.
        overflow = self.after_backward(*backward, saved)
        return losses, auxes, overflow, scale

    def overflowed_loss_scales(self, overflowed):
        """For each loss scale whether its gradients, of the weights of these names, overflowed in a skipped step."""
        if len(self.loss_scales) == 1 or not overflowed:
            return [True] * len(self.loss_scales)
        weights = (optimizer.parameters for optimizer in self.optimizers.optimizers)
        return [any(weight.name in overflowed for weight in its) for its in weights]

    def flush(self):
        """Ends a cycle that has begun. Returns whether it overflowed, a bool Tensor; None if none has begun."""
        return self.flush_cycle() if self.accumulation.has_begun() else None


class AfterBackward(nn.Cell):
    """What follows the gradients: in PyNative mode, too, one compiled graph, hence a cell of its own."""

    def __init__(
        self,
        forward_state: AnyForwardState,
        unscale: AnyUnscale,
        accumulation: AnyAccumulation,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.accumulation = accumulation

    def construct(self, grads, scale, saved):
        others = self.forward_state.overflowed(saved)  # 3. What the forward wrote may show what no gradient does.
        grads, divisor = self.unscale(grads, scale)  # 4. Unscale in float32.
        return self.accumulation(grads, divisor, scale, others, (), saved)  # 5. Accumulate; at the cycle's end, decide.


class AfterAttempts(nn.Cell):
    """The same where the gradients of each attempt were unscaled and checked: what is left of it."""

    def __init__(self, accumulation: AnyAccumulation) -> None:
        super().__init__(auto_prefix=False)
        self.accumulation = accumulation

    def construct(self, grads, divisor, scale, overflow, saved):
        return self.accumulation(
            grads, divisor, scale, (), (overflow,), saved
        )  # 5. Accumulate; at the cycle's end, decide.


class Decision(nn.Cell):
    """What ends a step: of a call, of an accumulation cycle, or of one that is flushed."""

    def __init__(
        self,
        complete: Complete,
        found_overflow: AnyFoundOverflow,
        scaling: AnyScaling,
        update_or_undo: Union[UpdateOrUndo, AlwaysUpdate],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.complete = complete
        self.found_overflow = found_overflow
        self.scaling = scaling
        self.update_or_undo = update_or_undo

    def construct(self, grads, divisor, scale, others, known, saved):
        grads = self.complete(grads)  # 6. Reduce the gradients across ranks, and transform them.
        overflow, flags = self.found_overflow(grads, divisor, others, known)  # 7. One overflow check.
        self.scaling.adjust(scale, overflow)  # 8. One update of the scale.
        return self.update_or_undo(overflow, grads, flags, saved)  # 9. One branch.
