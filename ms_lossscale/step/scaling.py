"""The loss scale within a step: it is read once, multiplied in, divided out, and updated once by its rule."""

from typing import Optional

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._bounds import Bounded, Bounds
from ms_lossscale._gradients import of_any_network, of_network
from ms_lossscale._mindspore import only_if
from ms_lossscale.loss_scale import LossScale
from ms_lossscale.step.accumulation import CycleState
from ms_lossscale.step.packing import Packing


def scaled(loss, scale):
    """Returns what is differentiated, in float32: a float16 loss times the scale may be infinite."""
    return loss.astype(mstype.float32) * scale


class Scaling(nn.Cell):
    """Handles the scale if each call is a step. The `further` Parameters belong to the state of its update rule."""

    def __init__(self, loss_scale: LossScale, *further: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.loss_scales = nn.CellList([loss_scale], auto_prefix=False)
        self.loss_scale = loss_scale
        self.parameters = ParameterTuple([*loss_scale.get_parameters(), *further])

    def read(self):
        """Returns the scale of this step."""
        return gradients.copy(self.loss_scale.scale_value)

    def adjust(self, scale, overflow):
        """Updates the scale by its rule, starting from the scale that the step used."""
        ops.assign(self.loss_scale.scale_value, self.loss_scale.advance(scale, overflow))

    def back_off(self, scale, overflow):
        """Updates the scale by its rule for the next attempt of the same step."""
        self.adjust(scale, overflow)

    def can_mend(self, scale, overflow):
        """Returns whether it overflowed and its update rule can lower the scale."""
        return ops.logical_and(overflow, self.loss_scale.can_back_off(scale))


class CycleScaling(Bounded, Scaling):
    """Handles the scale if the `steps` calls of a cycle are one step: all use the scale of the first call."""

    def __init__(self, loss_scale: LossScale, state: CycleState, steps: int, prefix: str) -> None:
        cycle_scale = Parameter(
            Tensor(1.0, mstype.float32), name=f"{prefix}accumulation.loss_scale", requires_grad=False
        )
        super().__init__(loss_scale, cycle_scale)
        self.cycle_state = state
        # It is negative once the loss scale has been set by hand within the cycle.
        self.cycle_scale = cycle_scale
        self._no_scale = Tensor(0.0, mstype.float32)
        # With a larger scale, Unscale would multiply by a subnormal number, and all gradients would be zero.
        loss_scale.limit(steps)
        loss_scale.mark_when_set(self.cycle_scale)

    def bounds(self) -> list[Bounds]:
        return [self.loss_scale.bounds_of(self.cycle_scale, may_be_negative=True)]

    def read(self):
        scale = ops.select(self.cycle_state.count.is_first(), self.loss_scale.scale_value, self.cycle_scale)
        ops.assign(self.cycle_scale, scale)
        return self.of_cycle()

    def of_cycle(self):
        """Returns the scale of the cycle that has begun."""
        return ops.abs(self.cycle_scale)

    def adjust(self, scale, overflow):
        # A scale set by hand within the cycle is used in the next one, unchanged.
        present = self.loss_scale.scale_value
        next_scale = self.loss_scale.advance(scale, overflow)
        is_set = ops.logical_or(self._is_set(), ops.not_equal(present, scale))
        ops.assign(present, ops.select(is_set, present, next_scale))

    def back_off(self, scale, overflow):
        # The cycle goes on at the lower scale: the gradients that it holds are unscaled.
        present, is_set = self.loss_scale.scale_value, self._is_set()
        is_next = ops.logical_or(is_set, ops.not_equal(present, scale))
        next_scale = self.loss_scale.advance(scale, overflow)
        ops.assign(present, ops.select(is_next, present, next_scale))
        ops.assign(self.cycle_scale, ops.select(is_set, -next_scale, next_scale))

    def _is_set(self):
        return self.cycle_scale < self._no_scale


class OwnScaling(Scaling):
    """
    Handles the scales if each network of a step has its own, so that each number above becomes one for each network. In
    a step that overflowed, the scales of networks whose gradients did not overflow stay as they are.
    """

    def __init__(self, scalings: list[Scaling]) -> None:
        nn.Cell.__init__(self, auto_prefix=False)
        self.scalings = nn.CellList(scalings, auto_prefix=False)
        self.loss_scales = nn.CellList([scaling.loss_scale for scaling in scalings], auto_prefix=False)
        self.parameters = ParameterTuple([parameter for scaling in scalings for parameter in scaling.parameters])

    def read(self):
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.read(),)
        return ops.stack(scales)

    def of_cycle(self):
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.of_cycle(),)
        return ops.stack(scales)

    def adjust(self, scale, overflow):
        moves = ops.logical_or(overflow, ops.logical_not(of_any_network(overflow)))
        for i, scaling in enumerate(self.scalings):
            only_if(of_network(i, moves), scaling.adjust, of_network(i, scale), of_network(i, overflow))

    def back_off(self, scale, overflow):
        for i, scaling in enumerate(self.scalings):
            overflowed = of_network(i, overflow)
            only_if(overflowed, scaling.back_off, of_network(i, scale), overflowed)

    def can_mend(self, scale, overflow):
        # Not if one of them overflowed and can't be lowered: it would overflow again.
        can = ()
        for i, scaling in enumerate(self.scalings):
            can += (scaling.can_mend(of_network(i, scale), of_network(i, overflow)),)
        of_each = ops.equal(ops.stack(can), overflow)
        return ops.logical_and(of_any_network(overflow), ops.ReduceAll()(of_each))


class Unscale(nn.Cell):
    """
    Divides the gradients by the scale, in float32, and multiplies them by `share`, the weight of a call in its step's
    mean. `packing` tells which gradients are whose, if each network has its own scale.
    """

    def __init__(self, share: float, packing: Optional[Packing] = None) -> None:
        super().__init__(auto_prefix=False)
        self.packing = packing
        self._share = Tensor(share, mstype.float32)

    def construct(self, grads, scale):
        if self.packing is None:
            return gradients.multiply(grads, self._share / scale)
        unscaled = ()
        for i, its_scale in enumerate(ops.unstack(scale)):
            unscaled += gradients.multiply(self.packing.of_network(i, grads), self._share / its_scale)
        return unscaled
