"""One training step as a transaction: either all of it happens, or only the loss scale and the counters change."""

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
    Runs the stages of a step in order: 1 to 3 in `construct`, 4 and 5 in AfterBackward, 6 to 9 in Decision. The step is
    split in three because PyNative mode compiles from stage 4 on, and `flush()` enters at stage 6. With retries,
    `attempts.py` repeats 1 to 4 and, without accumulation, also 6 and 7.

    1. Read the scale once. 2. Copy what the forward will write. 3. Clear an NPU's register; forward and backward.
    4. Unscale. 5. Accumulate; all calls but the last of a cycle end here. 6. Reduce across ranks, and transform. 7. One
    overflow check. 8. One update of the scale. 9. One branch: update, or undo.

    `build.py` leaves out the stages that a training cell does not need, or chooses ones that do nothing. One network is
    the case N = 1 of several. Parts of the stages are attributes of the Step, too.

    Inputs:
        - **\\*inputs** - The inputs of the networks.

    Outputs:
        Tuple of four: the tuples of losses and of aux, whether the step overflowed, and the scale that was used, of
        shape :math:`()`, or of shape :math:`(N,)` if each network has its own. Index the result rather than unpack it:
        graph mode warns about unused names.
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
        """Returns which scales' gradients overflowed, given the names of the weights; without names, all did."""
        if len(self.loss_scales) == 1 or not overflowed:
            return [True] * len(self.loss_scales)
        weights = (optimizer.parameters for optimizer in self.optimizers.optimizers)
        return [any(weight.name in overflowed for weight in its) for its in weights]

    def has_begun(self):
        """Returns whether an accumulation cycle has begun."""
        return self.cycle_state is not None and self.cycle_state.count.has_begun()

    def flush(self):
        """Ends a cycle that has begun. Returns whether it overflowed, a bool Tensor, or None if none has begun."""
        return self.flush_cycle() if self.has_begun() else None


class AfterBackward(Stage):
    """Does what follows the backward. It is a cell of its own to be compiled in PyNative mode, too."""

    forward_state: ForwardState
    unscale: Union[Unscale, UnscaleInClipping]
    end_of_call: Union["Decision", "Accumulation"]

    def construct(self, grads, scale, saved):
        others = self.forward_state.overflowed(saved)  # 3. An overflow may show only in what the forward wrote.
        grads, divisor = self.unscale(grads, scale)  # 4. Unscale in float32.
        return self.end_of_call(grads, divisor, scale, others, (), saved)  # 5. Accumulate; at the cycle's end, decide.


class AfterAttempts(Stage):
    """Replaces AfterBackward if there are retries: each attempt has already unscaled and checked its gradients."""

    end_of_call: Union["Decision", "Accumulation"]

    def construct(self, grads, divisor, scale, overflow, saved):
        return self.end_of_call(grads, divisor, scale, (), (overflow,), saved)  # 5. As above.


class Accumulation(Stage):
    """Adds up a cycle's gradients, and makes one step at its last call. Inputs and outputs as :class:`Decision`."""

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
        return self.forward_state.end_call(overflow, saved)


class Flush(Stage):
    """Ends a cycle before its last call: averages over the calls made so far, then updates or skips."""

    cycle_state: CycleState
    decision: "Decision"
    scaling: Union[CycleScaling, OwnScaling]
    overflow_detector: OverflowDetector
    packing: Packing
    forward_state: ForwardState

    def __init__(self, **stages: Any) -> None:
        super().__init__(**stages)
        self._one = Tensor(1.0, mstype.float32)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self):
        # Other work may have raised the register since the last call of the cycle.
        grads = self.packing.pack(self.overflow_detector.start(self.use_parameters(self.cycle_state.partial_mean())))
        scale = self.scaling.of_cycle()
        saved = self.forward_state.save_shared()
        overflow = self.decision(grads, self._one, scale, (), (self.cycle_state.overflow,), ())
        self.cycle_state.reset(overflow)
        return self.forward_state.end_call(overflow, saved)


class Decision(Stage):
    """
    Ends a step, which is a call, an accumulation cycle or a cycle that is flushed: checks it, then updates or undoes.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the step, multiplied by `divisor`.
        - **divisor** (Tensor) - What the gradients still have to be divided by: 1, or the scale.
        - **scale** (Tensor) - The loss scale of the step.
        - **others** (tuple[Tensor]) - Other signs of an overflow than the gradients, bools of shape :math:`()`.
        - **known** (tuple[Tensor]) - Whether an overflow was found earlier in the step.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, whether the step overflowed, bool of shape :math:`()`. It is available once the branch is done.
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
