"""One training step as a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

from typing import Any, Callable, Optional, Union

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._gradients import of_any_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import Compiled, only_if
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.accumulation import CycleState
from ms_lossscale.step.attempts import Attempts, Trial
from ms_lossscale.step.forward_backward import ForwardsAndBackwards
from ms_lossscale.step.found_overflow import FoundOverflow, KnownOverflow
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.scaling import CycleScaling, OwnScaling, Scaling, Unscale, UnscaleInClipping
from ms_lossscale.step.stage import Clipping, ForwardState, Stage
from ms_lossscale.step.update import Undo, Update


class Step(Stage):
    """
    The order of events: 1 to 3 in `construct`, 4 and 5 in that of AfterBackward, 6 to 9 in that of Decision, below.
    The step is split in three because PyNative mode compiles from 4 on, and `flush()` enters at 6. With retries,
    `attempts.py` repeats 1 to 4 and, where each call is a step, 6 and 7.

    1. Read the scale once. 2. Copy what the forward will write. 3. Clear an NPU's register; forward and backward.
    4. Unscale. 5. Accumulate; all calls but the last of a cycle end here. 6. Reduce across ranks, and transform. 7. One
    overflow check. 8. One update of the scale. 9. One branch: update, or undo.

    What a training cell does without is left out or does nothing, and one network is the case N = 1 of several:
    `build.py` chooses the stages. The stages of `construct` are given along with what they are made of themselves.

    Inputs:
        - **\\*inputs** - The inputs of the networks.

    Outputs:
        Tuple of four: the tuples of losses and of aux, whether the step overflowed, and the scale that was used, of
        shape :math:`()`, or those of the networks, of shape :math:`(N,)`. Index the result rather than unpack it: graph
        mode warns about unused names.
    """

    scaling: Scaling
    forward_state: ForwardState
    forwards_and_backwards: ForwardsAndBackwards
    attempts: Union[ForwardsAndBackwards, Attempts]
    after_backward: Union["AfterBackward", "AfterAttempts", Compiled]
    decision: "Decision"
    cycle_state: Optional[CycleState]
    flush_cycle: Union["Flush", Compiled, None]
    make_trial: Callable[[], Trial]

    def __init__(self, **stages: Any) -> None:
        super().__init__(**stages)
        self.overflow_detector = self.forwards_and_backwards.overflow_detector
        self.loss_scales = self.scaling.loss_scales
        update = self.decision.update
        self.optimizers = update.optimizers
        self.clipping = update.clipping
        self.moving_averages = update.moving_averages
        self.step_counters = update.step_counters

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

    def has_begun(self):
        """Whether a cycle has begun."""
        return self.cycle_state is not None and self.cycle_state.count.has_begun()

    def flush(self):
        """Ends a cycle that has begun. Returns whether it overflowed, a bool Tensor; None if none has begun."""
        return self.flush_cycle() if self.has_begun() else None


class AfterBackward(Stage):
    """What follows the gradients: in PyNative mode, too, one compiled graph, hence a cell of its own."""

    forward_state: ForwardState
    unscale: Union[Unscale, UnscaleInClipping]
    end_of_call: Union["Decision", "Accumulation"]

    def construct(self, grads, scale, saved):
        others = self.forward_state.overflowed(saved)  # 3. What the forward wrote may show what no gradient does.
        grads, divisor = self.unscale(grads, scale)  # 4. Unscale in float32.
        return self.end_of_call(grads, divisor, scale, others, (), saved)  # 5. Accumulate; at the cycle's end, decide.


class AfterAttempts(Stage):
    """The same where the gradients of each attempt were unscaled and checked: what is left of it."""

    end_of_call: Union["Decision", "Accumulation"]

    def construct(self, grads, divisor, scale, overflow, saved):
        return self.end_of_call(grads, divisor, scale, (), (overflow,), saved)  # 5. As above.


class Accumulation(Stage):
    """The calls of a cycle are one step, at its last call. Inputs and outputs as :class:`Decision`."""

    cycle_state: CycleState
    decision: "Decision"
    found_in_call: Union[FoundOverflow, KnownOverflow]
    forward_state: ForwardState
    packing: Packing

    def construct(self, grads, divisor, scale, others, known, saved):
        known += (self.cycle_state.overflow,)
        if self.cycle_state.count.is_last():
            grads = self.packing.pack(gradients.add(self.cycle_state.gradients, self.packing.unpack(grads)))
            overflow = self.decision(grads, divisor, scale, others, known, saved)
            self.cycle_state.reset(overflow)
        else:
            overflow = self.found_in_call(grads, (), others, known)[0]
            self.cycle_state.add(self.packing.unpack(grads), overflow)
            overflow = only_if(of_any_network(overflow), self.forward_state.restore_step, saved)
        return overflow


class Flush(Stage):
    """Ends a cycle before its last call: averages over the calls that it has really had, and updates or skips."""

    cycle_state: CycleState
    decision: "Decision"
    scaling: Union[CycleScaling, OwnScaling]
    overflow_detector: OverflowDetector
    packing: Packing

    def __init__(self, **stages: Any) -> None:
        super().__init__(**stages)
        self._one = Tensor(1.0, mstype.float32)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self):
        # A register may have been raised by other work since the cycle's last call.
        grads = self.packing.pack(self.overflow_detector.start(self.use_parameters(self.cycle_state.partial_mean())))
        scale = self.scaling.of_cycle()
        overflow = self.decision(grads, self._one, scale, (), (self.cycle_state.overflow,), ())
        self.cycle_state.reset(overflow)
        return overflow


class Decision(Stage):
    """
    What ends a step: of a call, of an accumulation cycle, or of one that is flushed.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the step, times `divisor`.
        - **divisor** (Tensor) - What they are still to be divided by: 1, or the scale.
        - **scale** (Tensor) - The loss scale of the step.
        - **others** (tuple[Tensor]) - What shows an overflow besides the gradients, bools of shape :math:`()`.
        - **known** (tuple[Tensor]) - Overflows of the step that were found before.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, whether the step overflowed, bool of shape :math:`()`, after all that the branch did.
    """

    complete: nn.Cell
    clipping: Clipping
    found_overflow: Union[FoundOverflow, KnownOverflow]
    scaling: Scaling
    update: Update
    undo: Optional[Undo]

    def construct(self, grads, divisor, scale, others, known, saved):
        grads = self.complete(grads)  # 6. Reduce the gradients across ranks, and transform them.
        norms_finite = self.clipping.measure(grads, divisor)
        overflow, flags = self.found_overflow(grads, norms_finite, others, known)  # 7. One overflow check.
        self.scaling.adjust(scale, overflow)  # 8. One update of the scale.
        if self.undo is None:
            return ops.depend(overflow, self.update(grads))  # 9. Nothing was checked: no branch.
        overflow = of_any_network(overflow)
        done = self.undo(grads, flags, saved) if overflow else self.update(grads)  # 9. One branch.
        return ops.depend(overflow, done)
