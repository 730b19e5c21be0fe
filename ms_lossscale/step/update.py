"""The two branches that a step can end in: all of it happens, or what the forward wrote is restored."""

from mindspore import nn, ops

from ms_lossscale._mindspore import only_if
from ms_lossscale.step.clipping import AnyClipping
from ms_lossscale.step.forward_state import AnyForwardState
from ms_lossscale.step.moving_average import MovingAverage
from ms_lossscale.step.of_network import of_any_network
from ms_lossscale.step.optimizers import Optimizers
from ms_lossscale.step.packing import AnyPacking
from ms_lossscale.step.step_counters import StepCounters


class Update(nn.Cell):
    """
    All that happens in a step that did not overflow.

    Args:
        clipping (Clipping): Clips the gradients.
        packing (Packing): Unpacks the gradients for the optimizers.
        optimizers (Optimizers): Step together.
        after_update (Cell): Takes no inputs.
        moving_averages (list[MovingAverage]): Of the weights.
        step_counters (StepCounters): Count the step.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.

    Outputs:
        Tensor, to wait for.
    """

    def __init__(
        self,
        clipping: AnyClipping,
        packing: AnyPacking,
        optimizers: Optimizers,
        after_update: nn.Cell,
        moving_averages: list[MovingAverage],
        step_counters: StepCounters,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.packing = packing
        self.optimizers = optimizers
        self.after_update = after_update
        self.moving_averages = nn.CellList(moving_averages, auto_prefix=False)
        self.step_counters = step_counters

    def construct(self, grads):
        for moving_average in self.moving_averages:
            only_if(self.step_counters.none_applied(), moving_average.begin)
        self.optimizers(self.packing.unpack(self.clipping(grads)))
        self.after_update()
        for moving_average in self.moving_averages:
            moving_average()
        return self.step_counters.count_applied()


class Undo(nn.Cell):
    """
    All that happens in a step that overflowed.

    Args:
        forward_state (Cell): Restores what the forward wrote.
        packing (Packing): Knows which gradients were not finite.
        step_counters (StepCounters): Count the step, and remember those gradients.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **flags** (tuple[Tensor]) - Which of them are finite, if the check found it, else empty.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, to wait for.
    """

    def __init__(self, forward_state: AnyForwardState, packing: AnyPacking, step_counters: StepCounters) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.packing = packing
        self.step_counters = step_counters

    def construct(self, grads, flags, saved):
        self.forward_state.restore_step(saved)
        are_finite = flags[0] if flags else self.packing.each_finite(grads)
        return self.step_counters.count_skipped(self.packing.by_weight(are_finite))


class UpdateOrUndo(nn.Cell):
    """
    The one branch on whether an overflow was found.

    Inputs:
        - **overflow** (Tensor) - Whether an overflow was found.
        - **grads** (tuple[Tensor]) - The gradients.
        - **flags** (tuple[Tensor]) - As for :class:`Undo`.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, whether the step overflowed, bool of shape :math:`()`, after all that the branch did.
    """

    def __init__(self, update: Update, undo: Undo) -> None:
        super().__init__(auto_prefix=False)
        self.update = update
        self.undo = undo

    def construct(self, overflow, grads, flags, saved):
        overflow = of_any_network(overflow)
        done = self.undo(grads, flags, saved) if overflow else self.update(grads)
        return ops.depend(overflow, done)


class AlwaysUpdate(nn.Cell):
    """No branch, where nothing is checked. Inputs and outputs as those of :class:`UpdateOrUndo`."""

    def __init__(self, update: Update) -> None:
        super().__init__(auto_prefix=False)
        self.update = update

    def construct(self, overflow, grads, flags, saved):
        return ops.depend(overflow, self.update(grads))


class Nothing(nn.Cell):
    """In the place of an `after_update`, or of a cycle to flush, that is not there."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self):
        pass
