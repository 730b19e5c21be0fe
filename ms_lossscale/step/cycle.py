"""The end of a call in an accumulation cycle: it adds up gradients, and the last call makes one step of them."""

from typing import Optional

from mindspore import nn

from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import only_if
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.scaling import Scaling, Unscale
from ms_lossscale.step.stage import ForwardState
from ms_lossscale.step.step import Check, Decision


class Accumulation(nn.Cell):
    """
    Adds the gradients of a call to those of its cycle. The last call checks the sum, and decides; of the others, each
    is checked by itself, unless `check_each` is None, since attempts have done so.

    Inputs:
        - **grads** (tuple[Tensor]) - The unscaled gradients of the call.
        - **of_state** (tuple[Tensor]) - Whether what the forward wrote overflowed, bools of shape :math:`()`.
        - **earlier** (tuple[Tensor]) - Overflows that were found in the call.
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
        check_each: Optional[Check],
        check: Check,
        decision: Decision,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.cycle_state = cycle_state
        self.packing = packing
        self.forward_state = forward_state
        self.check_each = check_each
        self.check = check
        self.decision = decision

    def construct(self, grads, of_state, earlier, scale, saved):
        earlier += (self.cycle_state.overflow,)
        if self.cycle_state.count.is_last():
            grads = self.packing.pack(self.cycle_state.sum_with(self.packing.unpack(grads)))
            overflow = self.decision(*self.check(grads, of_state, earlier), scale, saved)
            self.cycle_state.reset(overflow)
        else:
            overflow = self._found(grads, of_state, earlier)
            self.cycle_state.add(self.packing.unpack(grads), overflow)
            overflow = only_if(of_any_network(overflow), self.forward_state.restore_step, saved)
        return self.forward_state.end_call(overflow, saved)

    def _found(self, grads, of_state, earlier):
        if self.check_each is None:
            return any_of(earlier)
        return self.check_each(grads, of_state, earlier)[1]


class EndOfCall(nn.Cell):
    """Ends a call of a cycle: 4 to 9, of which all calls but the last make 4 and 5. Returns whether it overflowed."""

    def __init__(self, forward_state: ForwardState, unscale: Unscale, accumulation: Accumulation) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.accumulation = accumulation

    def construct(self, grads, scale, saved):
        of_state = self.forward_state.overflowed(saved)  # 3. An overflow may show only in what the forward wrote.
        grads = self.unscale(grads, scale)  # 4. Unscale in float32.
        return self.accumulation(grads, of_state, (), scale, saved)  # 5. Accumulate.


class Flush(nn.Cell):
    """Ends a cycle before its last call: averages over the calls made so far, then updates or skips."""

    def __init__(
        self,
        cycle_state: CycleState,
        packing: Packing,
        forward_state: ForwardState,
        overflow_detector: OverflowDetector,
        scaling: Scaling,
        check: Check,
        decision: Decision,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.cycle_state = cycle_state
        self.packing = packing
        self.forward_state = forward_state
        self.overflow_detector = overflow_detector
        self.scaling = scaling
        self.check = check
        self.decision = decision
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self):
        # Other work may have raised the register since the last call of the cycle.
        grads = self.packing.pack(self.overflow_detector.start(self.use_parameters(self.cycle_state.partial_mean())))
        scale = self.scaling.of_cycle()
        saved = self.forward_state.save_shared()
        overflow = self.decision(*self.check(grads, (), (self.cycle_state.overflow,)), scale, ())
        self.cycle_state.reset(overflow)
        return self.forward_state.end_call(overflow, saved)
