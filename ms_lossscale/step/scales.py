"""The loss scales of a step: how it reads them, lets their update rules take a step, and which of them stand still."""

import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import all_of, any_of
from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale._values import Bounded, numbered, state
from ms_lossscale.input_gradient import holds_input_gradient


class Scaling(nn.Cell):
    """One loss scale in a step that is one call of a training cell."""

    def __init__(self, loss_scale):
        super().__init__(auto_prefix=False)
        self.loss_scale = loss_scale

    def read(self):
        """Begins a call. Returns its scale."""
        return prim.deepcopy(self.loss_scale.scale_value)

    def advance(self, scale, overflow):
        """Lets the update rule take a step that used this scale. Returns what it makes of it."""
        next_scale = self.loss_scale._advance(scale, overflow)
        return ops.depend(next_scale, prim.assign(self.loss_scale.scale_value, next_scale))

    def back_off(self, scale, overflow):
        """Does the same between two attempts of a call."""
        return self.advance(scale, overflow)

    def now(self):
        """Returns the scale at which a call that has begun goes on."""
        return prim.deepcopy(self.loss_scale.scale_value)

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        return list(self.loss_scale.get_parameters())


class MovableScaling(Scaling):
    """
    A loss scale that something else may move until the step ends. What it sets stays: the update rule leaves it alone.
    `is_set` is an int32 Parameter that shows, as 1, that the scale was set by hand within the step.
    """

    def __init__(self, loss_scale, is_set):
        super().__init__(loss_scale)
        self._zero = Tensor(0, mstype.int32)
        # Hidden from checkpoints, which are saved between two steps.
        object.__setattr__(self, "is_set", is_set)
        loss_scale._mark_when_set(is_set)

    def read(self):
        scale = prim.deepcopy(self.loss_scale.scale_value)
        return ops.depend(scale, prim.assign(self.is_set, self._zero))

    def advance(self, scale, overflow):
        next_scale = self.loss_scale._advance(scale, overflow)
        present = self.loss_scale.scale_value
        is_there = prim.logical_and(prim.equal(present, scale), prim.equal(self.is_set, self._zero))
        kept = prim.select(is_there, next_scale, present)
        return ops.depend(next_scale, prim.assign(self.loss_scale.scale_value, kept))


class CycleScaling(Bounded, MovableScaling):
    """A loss scale in an accumulation cycle: the scale of its first call is that of all."""

    def __init__(self, loss_scale, cycle, prefix):
        is_set = state(f"{prefix}accumulation.scale_is_set", np.int32(0))
        super().__init__(loss_scale, is_set)
        self.is_set_within_cycle = is_set
        self.cycle = cycle
        self.cycle_scale = state(f"{prefix}accumulation.loss_scale", np.float32(1))
        # With a larger scale, `1 / steps / scale` would be a subnormal number.
        loss_scale._limit_to(2.0 ** (126 - (cycle.count.steps - 1).bit_length()))

    def _bounds(self):
        return [self.loss_scale._bounds_of(self.cycle_scale)]

    def read(self):
        is_first = self.cycle.count.is_first()
        scale = prim.select(is_first, self.loss_scale.scale_value, self.cycle_scale)
        prim.assign(self.is_set, prim.select(is_first, self._zero, self.is_set))
        return ops.depend(scale, prim.assign(self.cycle_scale, scale))

    def back_off(self, scale, overflow):
        """Does the same between two attempts of a call: the cycle goes on at the lower scale."""
        return prim.assign(self.cycle_scale, self.advance(scale, overflow))

    def now(self):
        """Returns the scale at which a cycle that has begun goes on."""
        return prim.deepcopy(self.cycle_scale)

    def shared_state(self):
        return [*super().shared_state(), self.cycle_scale, self.is_set]


def _is_set(prefix):
    return state(numbered(f"{prefix}scale_is_set"), np.int32(0))


class Scales(nn.Cell):
    """The loss scales of a step: one that its networks share, or one for each."""

    def __init__(self, plan, cycle):
        super().__init__(auto_prefix=False)
        self.loss_scales = nn.CellList(plan.loss_scales, auto_prefix=False)
        prefixes = plan.prefixes if plan.has_own_scales else [plan.prefix]
        if cycle is not None:
            scalings = [CycleScaling(scale, cycle, prefix) for scale, prefix in zip(plan.loss_scales, prefixes)]
        elif plan.is_manual:
            scalings = [MovableScaling(scale, _is_set(prefix)) for scale, prefix in zip(plan.loss_scales, prefixes)]
        else:
            scalings = list(map(Scaling, plan.loss_scales))
        self.scalings = nn.CellList(scalings, auto_prefix=False)
        if plan.settings.max_retries > 0:
            # For monitors, hidden from checkpoints: at which scales the call began that was retried last.
            began_at = [state(f"{prefix}retries.began_at", np.float32(0)) for prefix in prefixes]
            object.__setattr__(self, "retried_call_began_at", ParameterTuple(began_at))

    def read(self):
        """Begins a call. Returns its scales."""
        scales = ()
        for scaling in self.scalings:
            scales = (*scales, scaling.read())
        return scales

    def now(self):
        """Returns the scales at which a call, or a cycle, that has begun goes on."""
        scales = ()
        for scaling in self.scalings:
            scales = (*scales, scaling.now())
        return scales

    def advance(self, scales, overflows, stands_still):
        """
        Lets the update rules take a step. If it overflowed, only those of the scales that overflowed do, and never one
        that `stands_still`: a flag for each scale, None if none can.
        """
        if len(self.scalings) == 1 and stands_still is None:
            return self.scalings[0].advance(scales[0], overflows[0])
        is_clean = prim.logical_not(any_of(overflows))
        done = ()
        for i in range(len(self.scalings)):  # Graph mode would parse ten functions for `enumerate`.
            moves = prim.logical_or(overflows[i], is_clean)
            if stands_still is not None:
                moves = prim.logical_and(moves, prim.logical_not(stands_still[i]))
            done = (*done, only_if(moves, self.scalings[i].advance, scales[i], overflows[i]))
        return done

    def tell_retry(self, scales, is_first):
        """Tells monitors the scales of an attempt, if it is the first of its call."""
        for i in range(len(self.scalings)):
            began_at = self.retried_call_began_at[i]
            prim.assign(began_at, prim.select(is_first, scales[i], began_at))

    def back_off(self, scales, overflows):
        """Lowers the scales that overflowed, between two attempts of a call. Returns what to wait for."""
        if len(self.scalings) == 1:
            return self.scalings[0].back_off(scales[0], overflows[0])
        done = ()
        for i in range(len(self.scalings)):
            done = (*done, only_if(overflows[i], self.scalings[i].back_off, scales[i], overflows[i]))
        return done

    def can_back_off(self, scales, overflows):
        """Returns whether one of them overflowed, and every one that did can be lowered."""
        can = (any_of(overflows),)
        for i in range(len(self.scalings)):
            can_be_lowered = self.loss_scales[i].can_back_off(scales[i])
            can = (*can, prim.logical_or(prim.logical_not(overflows[i]), can_be_lowered))
        return all_of(can)

    def times_set(self):
        """Returns how often somebody has set or loaded one of them."""
        return sum(loss_scale._times_set for loss_scale in self.loss_scales)

    def are_at_least_one(self):
        """Returns whether none is below 1."""
        return all(loss_scale.get_loss_scale() >= 1 for loss_scale in self.loss_scales)

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        return [parameter for scaling in self.scalings for parameter in scaling.shared_state()]


class Patience(nn.Cell):
    """
    Tells which loss scales stand still, since a forward was not finite, which no lower scale mends. Where an
    InputGradient works on a scale, a lower one may mend the forward.
    """

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        # For each scale, the losses that keep it from falling, and whether what the forward wrote does.
        self._losses_of_scale = tuple(_losses_of(plan, i) for i in range(len(plan.loss_scales)))
        self._counts_state = tuple(
            _waits(loss_scale) and not holds_input_gradient(plan.networks, loss_scale)
            for loss_scale in plan.loss_scales
        )

    def forward_failed(self, call, verdict, overflows):
        """
        Returns for each scale whether it stands still. Which network wrote what became not finite is not known: with
        scales of their own, that counts where nothing else tells whose overflow it is.
        """
        lost = self._lost(call, verdict)
        failed = ()
        for i in range(len(overflows)):
            flags = (gradients.never(call["scales"][i]),)
            if len(lost) > 0:
                for j in self._losses_of_scale[i]:
                    flags = (*flags, lost[j])
            if "state_not_finite" in verdict and self._counts_state[i]:
                counts = verdict["state_not_finite"]
                if len(overflows) > 1:
                    counts = prim.logical_and(counts, all_of(overflows))
                    if len(lost) > 0:
                        counts = prim.logical_and(counts, prim.logical_not(any_of(lost)))
                flags = (*flags, counts)
            failed = (*failed, any_of(flags))
        return failed

    def _lost(self, call, verdict):
        """Returns for each loss whether it is not finite, or its weight can't be one."""
        lost = ()
        losses = call["losses"]
        for i in range(len(losses)):
            flag = prim.logical_not(gradients.is_finite(losses[i]))
            if "impossible_weights" in verdict:
                # The one loss of a ManualStep has the same weight for all networks.
                flag = prim.logical_or(flag, verdict["impossible_weights"][i])
            lost = (*lost, flag)
        return lost


def _waits(loss_scale):
    return loss_scale.drop_overflow_update and not loss_scale.backoff_if_loss_not_finite


def _losses_of(plan, number):
    """Returns the numbers of the losses that keep this scale from falling."""
    loss_scale = plan.loss_scales[number]
    if not _waits(loss_scale):
        return ()
    is_shared = plan.losses == 1 or not plan.has_own_scales
    candidates = range(plan.losses) if is_shared else (number,)
    # One network may compute all losses, and the one loss of a ManualStep may be that of all networks.
    has_all = plan.losses == 1 or len(plan.networks) == 1
    return tuple(
        i for i in candidates if not holds_input_gradient(plan.networks if has_all else (plan.networks[i],), loss_scale)
    )
