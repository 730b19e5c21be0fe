"""The end of a call in an accumulation cycle: it adds up gradients, and the last call makes one step of them."""

from typing import Optional

from mindspore import nn

from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import only_if
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.cause import CycleCause
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.scaling import Scaling, Unscale
from ms_lossscale.step.stage import ForwardState, Mean
from ms_lossscale.step.step import Check, Decision


class Accumulation(nn.Cell):
    """
    Adds the gradients of a call to those of its cycle. The last call checks the sum, and decides; of the others, each
    is checked by itself, unless `check_each` is None, since attempts have done so.

    Inputs:
        - **grads** (tuple[Tensor]) - The unscaled gradients of the call.
        - **of_state** (tuple[Tensor]) - Whether what the forward wrote overflowed, bools of shape :math:`()`.
        - **earlier** (tuple[Tensor]) - Overflows that were found in the call.
        - **losses**, **weights** (tuple[Tensor]) - Those of the call.
        - **origin** (tuple) - Where an overflow of the call may have come from, see :class:`Decision`.
        - **scale** (Tensor) - The loss scale of the cycle.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, whether the cycle has overflowed, bool.
    """

    def __init__(
        self,
        cycle_state: CycleState,
        packing: Packing,
        forward_state: ForwardState,
        mean: Mean,
        cause: CycleCause,
        check_each: Optional[Check],
        check: Check,
        decision: Decision,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.cycle_state = cycle_state
        self.packing = packing
        self.forward_state = forward_state
        self.mean = mean
        self.cause = cause
        self.check_each = check_each
        self.check = check
        self.decision = decision

    def construct(self, grads, of_state, earlier, losses, weights, origin, scale, saved):
        if self.cycle_state.count.is_last():
            if self.cause.is_asked:
                origin = self._with_own(origin, grads, of_state, earlier)
            grads = self.packing.pack(self.cycle_state.sum_with(self.packing.unpack(grads)))
            grads = self.mean(grads, self.cycle_state.weights_with(weights))
            checked = self.check(grads, of_state, earlier + (self.cycle_state.overflow,))
            overflow = self.decision(*checked, self.cycle_state.losses_with(losses), origin, scale, saved)
            self.cycle_state.reset(overflow)
        else:
            origin = self._with_own(origin, grads, of_state, earlier)
            overflow = any_of(origin[2][:1] + (self.cycle_state.overflow,))
            self.cycle_state.add(self.packing.unpack(grads), overflow, losses, weights)
            overflow = only_if(of_any_network(overflow), self._undo_call, saved, origin)
        return self.forward_state.end_call(overflow, saved)

    def _with_own(self, origin, grads, of_state, earlier):
        """Returns the origin, with whether the call itself overflowed, and whether that came from its forward."""
        own = any_of(earlier) if self.check_each is None else self.check_each(grads, of_state, earlier)[1]
        return origin[0], origin[1], (own,) + self.cause.of_call(origin[0], origin[1], own)

    def _undo_call(self, saved, origin):
        self.cause.remember(*origin)
        return self.forward_state.restore_step(saved)


class EndOfCall(nn.Cell):
    """Ends a call of a cycle: 4 to 9, of which all calls but the last make 4 and 5. Returns whether it overflowed."""

    def __init__(self, forward_state: ForwardState, unscale: Unscale, accumulation: Accumulation) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.accumulation = accumulation

    def construct(self, grads, losses, weights, scale, saved):
        of_state = self.forward_state.overflowed(saved)  # 3. An overflow may show only in what the forward wrote.
        grads = self.unscale(grads, scale)  # 4. Unscale in float32.
        # 5. Accumulate.
        return self.accumulation(grads, of_state, (), losses, weights, (losses, of_state, ()), scale, saved)


class Flush(nn.Cell):
    """Ends a cycle before its last call: averages over the calls made so far, then updates or skips."""

    def __init__(
        self,
        cycle_state: CycleState,
        packing: Packing,
        forward_state: ForwardState,
        mean: Mean,
        overflow_detector: OverflowDetector,
        scaling: Scaling,
        check: Check,
        decision: Decision,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.cycle_state = cycle_state
        self.packing = packing
        self.forward_state = forward_state
        self.mean = mean
        self.overflow_detector = overflow_detector
        self.scaling = scaling
        self.check = check
        self.decision = decision
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self):
        grads = self.mean.partial(self.packing.pack(self.cycle_state.gradients), self.cycle_state)
        # Other work may have raised the register since the last call of the cycle.
        grads = self.overflow_detector.start(self.use_parameters(grads))
        scale = self.scaling.of_cycle()
        saved = self.forward_state.save_shared()
        checked = self.check(grads, (), (self.cycle_state.overflow,))
        overflow = self.decision(*checked, self.cycle_state.partial_losses(), ((), (), ()), scale, ())
        self.cycle_state.reset(overflow)
        return self.forward_state.end_call(overflow, saved)
