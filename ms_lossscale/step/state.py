"""What a step counts and keeps from one call to the next: its scale, its accumulation cycle, and the steps so far."""

import itertools

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, Bounds, of_count

_numbers = itertools.count()
# Why a step was skipped. The first that holds counts.
REASONS = ("condition", "loss", "forward_state", "gradients", "detector")


def _state(name, value):
    return Parameter(Tensor(value), name=name, requires_grad=False)


class Scaling(Bounded, nn.Cell):
    """
    One loss scale in a step. In a `cycle` of accumulation, the scale of its first call is that of all. If something
    else `may_move` the scale until the step ends, what it sets stays: the update rule leaves it alone.
    """

    def __init__(self, loss_scale, cycle, prefix, may_move):
        super().__init__(auto_prefix=False)
        self.loss_scale, self.cycle, self._may_move = loss_scale, cycle, may_move
        self.shared_state, self._zero = list(loss_scale.get_parameters()), Tensor(0, mstype.int32)
        if may_move and cycle is None:
            # Hidden from checkpoints, which are saved between two steps.
            is_set = _state(f"{prefix}scale_is_set_{next(_numbers)}", np.int32(0))
            object.__setattr__(self, "is_set", is_set)
        if cycle is not None:
            self.cycle_scale = _state(f"{prefix}accumulation.loss_scale", np.float32(1))
            self.is_set = _state(f"{prefix}accumulation.scale_is_set", np.int32(0))
            self.shared_state += [self.cycle_scale, self.is_set]
            # With a larger scale, `1 / steps / scale` would be a subnormal number.
            loss_scale.limit_to(
                2.0 ** (126 - (cycle.count.steps - 1).bit_length()),
                "if the gradients of several calls are accumulated",
                "With a larger one, the factor that unscales them would be a subnormal number, which makes every "
                "gradient zero. Choose a smaller one.",
            )
        if may_move:
            # Whether it was set by hand within the step, 1 or 0.
            loss_scale.mark_when_set(self.is_set)

    def bounds(self):
        return [] if self.cycle is None else [self.loss_scale.bounds_of(self.cycle_scale)]

    def read(self):
        """Begins a call. Returns its scale."""
        if self.cycle is None:
            scale = prim.deepcopy(self.loss_scale.scale_value)
            return ops.depend(scale, prim.assign(self.is_set, self._zero)) if self._may_move else scale
        is_first = self.cycle.count.is_first()
        scale = prim.select(is_first, self.loss_scale.scale_value, self.cycle_scale)
        prim.assign(self.is_set, prim.select(is_first, self._zero, self.is_set))
        return ops.depend(scale, prim.assign(self.cycle_scale, scale))

    def advance(self, scale, overflow):
        """Lets the update rule take a step that used this scale. Returns what it makes of it."""
        next_scale = self.loss_scale.advance(scale, overflow)
        kept = next_scale
        if self._may_move:
            present = self.loss_scale.scale_value
            is_there = prim.logical_and(prim.equal(present, scale), prim.equal(self.is_set, self._zero))
            kept = prim.select(is_there, next_scale, present)
        return ops.depend(next_scale, prim.assign(self.loss_scale.scale_value, kept))

    def back_off(self, scale, overflow):
        """Does the same between two attempts of a call: the cycle goes on at the lower scale."""
        next_scale = self.advance(scale, overflow)
        if self.cycle is not None:
            next_scale = prim.assign(self.cycle_scale, next_scale)
        # Returned, since graph mode may drop a call that returns nothing.
        return next_scale

    def now(self):
        """Returns the scale at which a call, or a cycle, that has begun goes on."""
        return prim.deepcopy(self.loss_scale.scale_value if self.cycle is None else self.cycle_scale)


class CycleCount(Bounded, nn.Cell):
    """
    Counts the calls of a cycle of `steps` calls. A second Parameter, with the name `length`, says how many the cycle
    that has begun takes, so that no other cell goes on with it. Both are 0 between two cycles.
    """

    def __init__(self, steps, name, length):
        super().__init__(auto_prefix=False)
        self.steps = steps
        self._zero, self._one, self._steps = (Tensor(number, mstype.int32) for number in (0, 1, steps))
        self.value, self.length = _state(name, np.int32(0)), _state(length, np.int32(0))

    def bounds(self):
        must_be = "the number of calls so far in a cycle, less than its length, or 0"
        in_cycle = Bounds(self.value, must_be, lambda value, length: value == 0 or 0 < value < length, self.length)
        return [in_cycle, of_count(self.length)]

    def is_first(self):
        """Returns whether this call is the first of its cycle."""
        return prim.equal(self.value, self._zero)

    def is_last(self):
        """Returns whether this call is the last of its cycle."""
        return prim.greater_equal(prim.add(self.value, self._one), self._steps)

    def count(self):
        """Counts a call."""
        prim.assign(self.length, self._steps)
        return prim.assign_add(self.value, self._one)

    def count_or_reset(self, is_last):
        """Counts a call, or ends the cycle if it is the last."""
        prim.assign(self.value, prim.select(is_last, self._zero, prim.add(self.value, self._one)))
        prim.assign(self.length, prim.select(is_last, self._zero, self._steps))

    def reset(self, after):
        """Ends the cycle, once `after` has been computed."""
        zero = ops.depend(self._zero, after)
        prim.assign(self.value, zero)
        prim.assign(self.length, zero)

    def has_begun(self):
        """Returns whether a cycle has begun, as a Python bool."""
        return bool(self.value.asnumpy() > 0)


class Cycle(nn.Cell):
    """
    What the calls of a cycle have added up: gradients, in float32; where losses have weights, for each network the sum
    of these, to which a network that has none adds 1; the losses times their weights, if conditions look at them; and
    what was found not to be finite. A cycle of a ManualStep, whose `weighted` is None, shows whether it is weighted.
    """

    def __init__(self, steps, weights, prefixes, prefix, scale_shape, weighted, losses, is_patient):
        super().__init__(auto_prefix=False)
        name = f"{prefix}accumulation."
        self.count = CycleCount(steps, f"{name}micro_steps", f"{name}steps")
        self.gradients = ParameterTuple(
            Parameter(initializer("zeros", its.shape, mstype.float32), name=f"{name}{its.name}", requires_grad=False)
            for of_network in weights
            for its in of_network
        )
        self.weights, self.is_weighted, self.losses = None, None, None
        if weighted is not False:
            self.weights = ParameterTuple(
                _state(f"{its}accumulation.sum_of_weights", np.float32(0)) for its in prefixes
            )
        if losses:
            self.losses = _state(f"{name}sum_of_losses", np.zeros(losses, np.float32))
        # Whether a loss, what a forward wrote, and, for each loss scale that stands still then, either was not finite.
        self.overflow = _state(f"{name}overflow", np.zeros(scale_shape, bool))
        self.lost, self.spoilt = _state(f"{name}loss_not_finite", False), _state(f"{name}state_not_finite", False)
        flags = [self.overflow, self.lost, self.spoilt]
        if is_patient:
            self.forward_not_finite = _state(f"{name}forward_not_finite", np.zeros(scale_shape, bool))
            flags.append(self.forward_not_finite)
        if weighted is None:
            self.is_weighted = _state(f"{name}is_weighted", False)
            flags.append(self.is_weighted)
        self.flags = ParameterTuple(flags)

    def add(self, grads, weights, losses, flags):
        """
        Adds a call. `weights` are those of the networks' losses, none if they have none; `flags` are the overflow and
        what was not finite. Returns what to wait for.
        """
        done = (gradients.assign_add(self.gradients, grads), gradients.assign_or(self.flags, flags))
        if self.weights is not None:
            done += (gradients.assign_add(self.weights, weights),)
        if self.losses is not None:
            of_calls = prim.stack(gradients.sums(losses))
            if self.weights is not None:
                of_calls = prim.mul(of_calls, self._of_losses(weights))
            done += (prim.assign_add(self.losses, of_calls),)
        return done, self.count.count()

    def sums_of_weights(self):
        """Returns for each network the sum of the weights of its losses, the number of calls if they have none."""
        if self.weights is None:
            return (prim.cast(self.count.value, mstype.float32),)
        return gradients.copy(self.weights)

    def mean_loss(self):
        """Returns the sum of the networks' losses, each the mean over the calls by weight, if they are kept."""
        if self.losses is None:
            return ()
        return (prim.reduce_sum(prim.div(self.losses, self._of_losses(self.sums_of_weights())), ()),)

    def _of_losses(self, weights):
        """Returns the weight of each loss, of which a ManualStep has one for all networks; 1 in the place of 0."""
        weights = prim.stack(weights[: self.losses.shape[0]])
        return prim.select(prim.greater(weights, ops.zeros_like(weights)), weights, ops.ones_like(weights))

    def reset(self, after):
        """Empties the cycle once `after` is computed. A multiplication by 0 would keep a NaN."""
        gradients.assign_zeros(self.gradients, after)
        gradients.assign_zeros(self.flags, after)
        if self.weights is not None:
            gradients.assign_zeros(self.weights, after)
        if self.losses is not None:
            gradients.assign_zeros((self.losses,), after)
        self.count.reset(after)


class StepCounters(Bounded, nn.Cell):
    """
    Counts applied, skipped and consecutively skipped steps, and retries if there are any, in int32 Parameters. A bool
    Parameter tells which weights' gradients were not finite in the last step that was skipped, and an int32 one, of
    shape :math:`(5,)`, how many steps were skipped for each reason.

    Args:
        weights (Sequence[Parameter]): The weights.
        prefix (str): What the names begin with.
        counts_retries (bool): Whether there are retries.
        counts_conditions (bool): Whether there are conditions.
    """

    def __init__(self, weights, prefix, counts_retries, counts_conditions):
        super().__init__(auto_prefix=False)
        name = f"{prefix}step_counters."
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._names = tuple(weight.name for weight in weights)
        self.applied_steps = _state(f"{name}applied_steps", np.int32(0))
        self.skipped_steps = _state(f"{name}skipped_steps", np.int32(0))
        self.consecutive_skipped_steps = _state(f"{name}consecutive_skipped_steps", np.int32(0))
        # A diagnosis, not a state: hidden from checkpoints, which other weights may load.
        object.__setattr__(self, "overflowed", _state(f"{name}overflowed", np.zeros(len(weights), bool)))
        self.skip_reasons = _state(f"{name}skip_reasons", np.zeros(len(REASONS), np.int32))
        self._counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        self.counts_retries, self.counts_conditions = counts_retries, counts_conditions
        if counts_retries:
            self.retries = _state(f"{name}retries", np.int32(0))
            self._counts.append("retries")
        # The numbers of the reasons that are asked; the last one is what remains.
        first, last = 0 if counts_conditions else 1, len(REASONS) - 1
        self._numbers = Tensor(np.arange(len(REASONS), dtype=np.int32))
        self._asked = Tensor(np.arange(first, last, dtype=np.int32))
        self._rest = Tensor(np.full(last - first, last, np.int32))

    def bounds(self):
        return [*(of_count(getattr(self, name)) for name in self._counts), of_count(self.skip_reasons)]

    def none_applied(self):
        """Returns whether no step has been applied yet, bool of shape ()."""
        return prim.equal(self.applied_steps, self._zero)

    def count_applied(self):
        prim.assign(self.consecutive_skipped_steps, self._zero)
        # Not the value of the Assign: MindSpore 2.7 warns where a branch returns it.
        return ops.depend(self.applied_steps, prim.assign_add(self.applied_steps, self._one))

    def count_retry(self):
        return prim.assign_add(self.retries, self._one)

    def count_skipped(self, are_finite, loss, state, by_condition):
        """
        Counts a step that is skipped: which weights' gradients are finite, whether a loss is not, whether what the
        forward wrote is not, and, where there are conditions, a tuple of whether one asked for it.
        """
        overflowed = prim.logical_not(are_finite)
        prim.assign(self.overflowed, overflowed)
        flags = prim.stack(by_condition + (loss, state, prim.reduce_any(overflowed, ())))
        first = prim.reduce_min(prim.select(flags, self._asked, self._rest), ())
        counted = prim.cast(prim.equal(self._numbers, first), mstype.int32)
        prim.assign_add(self.skip_reasons, counted)
        prim.assign_add(self.consecutive_skipped_steps, self._one)
        return ops.depend(self.skipped_steps, prim.assign_add(self.skipped_steps, self._one))

    def as_dict(self):
        """Returns the counts, ints by name."""
        counts = {name: int(getattr(self, name).asnumpy()) for name in self._counts}
        if self.counts_conditions:
            counts["skipped_by_condition"] = int(self.skip_reasons.asnumpy()[0])
        return counts

    def reasons(self):
        """Returns how many steps were skipped for each reason, ints by name."""
        reasons = dict(zip(REASONS, self.skip_reasons.asnumpy().tolist()))
        if not self.counts_conditions:
            del reasons["condition"]
        return reasons

    def steps_made(self):
        """Returns the number of steps so far, skipped ones included."""
        return int(self.applied_steps.asnumpy()) + int(self.skipped_steps.asnumpy())

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        # Not the reasons, which differ for weights of which each rank has its own part.
        return [parameter for parameter in self.get_parameters() if parameter is not self.skip_reasons]

    def overflowed_parameters(self):
        """Returns the names of the weights whose gradients were not finite in the last step that was skipped."""
        return [name for name, overflowed in zip(self._names, self.overflowed.asnumpy()) if overflowed]
