"""The loss scale within a step: it is read once, multiplied in, divided out, and updated once by its rule."""

from typing import Optional

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, Bounds
from ms_lossscale._gradients import any_of, of_any_network, of_network
from ms_lossscale._mindspore import only_if
from ms_lossscale.loss_scale import LossScale
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.packing import Packing


def scaled(loss, scale):
    """Returns what is differentiated, in float32: a float16 loss times the scale may be infinite."""
    # Not by a function of tuples: what is no Tensor, and so no loss, must fail here.
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

    def peek(self):
        """Returns the scale of this step, too, at any time until the step adjusts it. Writes nothing."""
        return gradients.copy(self.loss_scale.scale_value)

    def adjust(self, scale, overflow, stands_still):
        """
        Updates the scale by its rule, starting from the scale that the step used, unless one of the flags in the tuple
        `stands_still` is True.
        """
        if len(stands_still) > 0:
            only_if(prim.logical_not(any_of(stands_still)), self._advance, scale, overflow)
        else:
            self._advance(scale, overflow)

    def _advance(self, scale, overflow):
        prim.assign(self.loss_scale.scale_value, self.loss_scale.advance(scale, overflow))

    def back_off(self, scale, overflow):
        """Updates the scale by its rule for the next attempt of the same step."""
        self._advance(scale, overflow)

    def can_mend(self, scale, overflow):
        """Returns whether it overflowed and its update rule can lower the scale."""
        return prim.logical_and(overflow, self.loss_scale.can_back_off(scale))

    def shared_state(self) -> list[Parameter]:
        """Returns the Parameters that must have the same values on all ranks."""
        return list(self.parameters)


class CycleScaling(Bounded, Scaling):
    """Handles the scale if the `steps` calls of a cycle are one step: all use the scale of the first call."""

    def __init__(self, loss_scale: LossScale, state: CycleState, steps: int, prefix: str) -> None:
        cycle_scale = Parameter(
            Tensor(1.0, mstype.float32), name=f"{prefix}accumulation.loss_scale", requires_grad=False
        )
        super().__init__(loss_scale, cycle_scale)
        self.cycle_state = state
        self.cycle_scale = cycle_scale
        # Whether the loss scale has been set by hand within the cycle.
        self.is_set = Parameter(Tensor(False), name=f"{prefix}accumulation.scale_is_set", requires_grad=False)
        # With a larger scale, Unscale would multiply by `1 / steps / scale`, a subnormal number.
        loss_scale.limit_to(
            2.0 ** (126 - (steps - 1).bit_length()),
            "if the gradients of several calls are accumulated",
            "With a larger one, the factor that unscales them would be a subnormal number, which makes every gradient "
            "zero. Choose a smaller one.",
        )
        loss_scale.mark_when_set(self.is_set)

    def bounds(self) -> list[Bounds]:
        return [self.loss_scale.bounds_of(self.cycle_scale)]

    def peek(self):
        return prim.select(self.cycle_state.count.is_first(), self.loss_scale.scale_value, self.cycle_scale)

    def read(self):
        is_first = self.cycle_state.count.is_first()
        scale = prim.select(is_first, self.loss_scale.scale_value, self.cycle_scale)
        prim.assign(self.cycle_scale, scale)
        prim.assign(self.is_set, prim.logical_and(self.is_set, prim.logical_not(is_first)))
        return scale

    def of_cycle(self):
        """Returns the scale of the cycle that has begun."""
        return gradients.copy(self.cycle_scale)

    def _advance(self, scale, overflow):
        self._next_scale(scale, overflow)

    def back_off(self, scale, overflow):
        # The cycle goes on at the lower scale: the gradients that it holds are unscaled.
        prim.assign(self.cycle_scale, self._next_scale(scale, overflow))

    def _next_scale(self, scale, overflow):
        """Updates the scale by its rule, but leaves one that was set by hand to the next cycle. Returns the rule's."""
        present = self.loss_scale.scale_value
        next_scale = self.loss_scale.advance(scale, overflow)
        is_set = prim.logical_or(self.is_set, prim.not_equal(present, scale))
        prim.assign(present, prim.select(is_set, present, next_scale))
        return next_scale

    def shared_state(self) -> list[Parameter]:
        return [*super().shared_state(), self.is_set]


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

    def shared_state(self) -> list[Parameter]:
        return [parameter for scaling in self.scalings for parameter in scaling.shared_state()]

    def read(self):
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.read(),)
        return prim.stack(scales)

    def peek(self):
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.peek(),)
        return prim.stack(scales)

    def of_cycle(self):
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.of_cycle(),)
        return prim.stack(scales)

    def adjust(self, scale, overflow, stands_still):
        moves = prim.logical_or(overflow, prim.logical_not(of_any_network(overflow)))
        for flag in stands_still:
            moves = prim.logical_and(moves, prim.logical_not(flag))
        for i, scaling in enumerate(self.scalings):
            only_if(of_network(i, moves), scaling.adjust, of_network(i, scale), of_network(i, overflow), ())

    def back_off(self, scale, overflow):
        for i, scaling in enumerate(self.scalings):
            overflowed = of_network(i, overflow)
            only_if(overflowed, scaling.back_off, of_network(i, scale), overflowed)

    def can_mend(self, scale, overflow):
        # Not if one of them overflowed and can't be lowered: it would overflow again.
        can = ()
        for i, scaling in enumerate(self.scalings):
            can += (scaling.can_mend(of_network(i, scale), of_network(i, overflow)),)
        of_each = prim.equal(prim.stack(can), overflow)
        return prim.logical_and(of_any_network(overflow), prim.reduce_all(of_each, ()))


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
