"""The accumulation cycle of a step: which call it is in, and what its calls have added up."""

import itertools

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._values import Bounded, Bounds, of_count, state
from ms_lossscale.step.cycle_settings import CycleSettings
from ms_lossscale.step.records import Call, Flags, Gradients


@gradients.of_each("Tensor", "Tensor")
def _assign_or(parameter, flag):
    """Makes each parameter True where its flag is."""
    return prim.assign(parameter, prim.logical_or(parameter, flag))


@gradients.of_one("Tensor", "Tensor")
def _assign_zero(after, parameter):
    """Sets a parameter to zero once the tensor `after` is computed."""
    return prim.assign(parameter, ops.depend(ops.zeros_like(parameter), after))


@gradients.of_one("Tensor", "Tensor")
def _assign_false(after, flag):
    """Sets a bool parameter to False once the tensor `after` is computed."""
    return prim.assign(flag, ops.depend(gradients.false_like(flag), after))


def _sums(losses):
    """Returns the sum of each loss, of shape (n,)."""
    if len(losses) == 1 and losses[0].ndim == 0:
        return prim.reshape(prim.cast(losses[0], mstype.float32), (1,))
    return prim.stack(gradients.sums(losses))


class CycleCount(Bounded, nn.Cell):
    """
    Counts the calls of a cycle of `steps` calls. A second Parameter, with the name `length`, says how many the cycle
    that has begun takes, so that no other cell goes on with it. Both are 0 between two cycles.
    """

    def __init__(self, steps, name, length):
        super().__init__(auto_prefix=False)
        self.steps = steps
        self._zero = Tensor(0, mstype.int32)
        self._one = Tensor(1, mstype.int32)
        self._steps = Tensor(steps, mstype.int32)
        self.value = state(name, np.int32(0))
        self.length = state(length, np.int32(0))

    def _bounds(self):
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


class Cycle(Bounded, nn.Cell):
    """
    What the calls of a cycle have added up: gradients, in float32; where losses have weights, for each network the sum
    of these, to which a network that has none adds 1; the losses times their weights; and what was found not to be
    finite. It also has the mean loss of the last cycle that ended.

    A cycle of a ManualStep shows by itself whether its losses have weights.
    """

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        settings = plan.settings
        name = f"{plan.prefix}accumulation."
        self.count = CycleCount(settings.gradient_accumulation_steps, f"{name}micro_steps", f"{name}steps")
        weighted = (False,) * len(plan.optimizers) if plan.is_manual else settings.weighted
        self.settings = CycleSettings(plan.drops_calls, plan.is_manual, weighted)
        # For what loads a checkpoint: no graph reads or writes it.
        self.settings_code = state(f"{name}settings", np.int32(self.settings.code))
        self._has_own_flags = plan.has_own_scales
        self._one = Tensor(1.0, mstype.float32)
        self._no_call = Tensor(0, mstype.int32)
        self._one_call = Tensor(1, mstype.int32)
        # For each network.
        self.gradients = tuple(
            ParameterTuple(
                Parameter(
                    initializer("zeros", weight.shape, mstype.float32), name=f"{name}{weight.name}", requires_grad=False
                )
                for weight in weights
            )
            for weights in plan.weights
        )
        self.weights = None
        if plan.is_manual or any(settings.weighted) or plan.drops_calls:
            self.weights = ParameterTuple(
                state(f"{prefix}accumulation.sum_of_weights", np.float32(0)) for prefix in plan.prefixes
            )
        self.losses = state(f"{name}sum_of_losses", np.zeros(plan.losses, np.float32))
        self.needs_losses = any(condition.needs_loss for condition in settings.skip_conditions)
        # How many calls were not told their loss, as in a ManualStep, or were saved by version 0.5, which kept none.
        self.missing_losses = state(f"{name}missing_losses", np.int32(0))
        # For monitors, hidden from checkpoints.
        object.__setattr__(self, "last_mean_loss", state(f"{name}last_mean_loss", np.float32(0)))
        object.__setattr__(self, "knows_last_mean", state(f"{name}knows_last_mean", np.int32(0)))
        # All that is added up.
        sums = [*itertools.chain(*self.gradients), *(self.weights or ()), self.losses, self.missing_losses]
        self.sums = ParameterTuple(sums)
        no_flags = np.zeros(len(plan.loss_scales) if self._has_own_flags else (), bool)
        self.overflow = state(f"{name}overflow", no_flags)
        # Whether a loss, and whether what a forward wrote, was not finite.
        self.lost = state(f"{name}loss_not_finite", False)
        self.spoilt = state(f"{name}state_not_finite", False)
        flags = [self.overflow, self.lost, self.spoilt]
        self.forward_not_finite = None
        if plan.is_patient:
            self.forward_not_finite = state(f"{name}forward_not_finite", no_flags)
            flags.append(self.forward_not_finite)
        self.is_weighted = None
        if plan.is_manual:
            self.is_weighted = state(f"{name}is_weighted", False)
            flags.append(self.is_weighted)
        self.flags = ParameterTuple(flags)

    def _bounds(self):
        return [of_count(self.missing_losses)]

    def add(self, call: Call, grads: Gradients, flags: Flags) -> tuple:
        """Adds a call and its unscaled gradients. Returns what to wait for."""
        done = (gradients.assign_add(self.gradients, grads), self.note(call, flags))
        done = done if self.weights is None else (done, gradients.assign_add(self.weights, self._weights_of(call)))
        return done, self._add_losses(call), self.count.count()

    def _add_losses(self, call):
        if len(call["losses"]) == 0:
            return prim.assign_add(self.missing_losses, self._one_call)
        losses = _sums(call["losses"])
        losses = prim.mul(losses, self._or_one(call["loss_weights"])) if "loss_weights" in call else losses
        return prim.assign_add(self.losses, losses)

    def _weights_of(self, call):
        return call["loss_weights"] if "loss_weights" in call else (self._one,) * len(self.gradients)

    def note(self, call, flags):
        """Adds the flags of a call. Returns what to wait for."""
        return _assign_or(self.flags, self._found(call, flags))

    def _found(self, call, flags):
        """Returns the flags of a call in the order of `self.flags`."""
        forward_failed = () if self.forward_not_finite is None else (self._stored(flags["forward_failed"]),)
        is_weighted = () if self.is_weighted is None else (self._has_weights(call),)
        return (self._stored(flags["overflows"]),) + flags["causes"] + forward_failed + is_weighted

    def _has_weights(self, call):
        has_none = gradients.never(self.count.value)
        return prim.logical_not(has_none) if "loss_weights" in call else has_none

    def has_overflowed(self, after):
        """Returns whether any call overflowed, once `after` is computed."""
        return prim.reduce_any(ops.depend(self.overflow, after), ())

    def overflows(self, after):
        """Returns for each scale whether a call overflowed, once `after` is computed."""
        return self._read(ops.depend(self.overflow, after))

    def forward_failed(self):
        """Returns for each scale whether a forward's own overflow keeps it from falling."""
        return self._read(self.forward_not_finite)

    def causes(self):
        """Returns whether a loss, and whether what the forward wrote, was not finite in any call."""
        return gradients.copy((self.lost, self.spoilt))

    def sums_of_weights(self):
        """Returns for each network the sum of the weights of its losses, the number of calls if they have none."""
        if self.weights is None:
            return (prim.cast(self.count.value, mstype.float32),) * len(self.gradients)
        return gradients.copy(self.weights)

    def mean_loss(self):
        """Returns the sum of the networks' losses, each the mean over the calls by weight."""
        if self.weights is None:
            return prim.div(prim.reduce_sum(self.losses, ()), prim.cast(self.count.value, mstype.float32))
        return prim.reduce_sum(prim.div(self.losses, self._or_one(self.sums_of_weights())), ())

    def tell(self, mean_loss):
        """Tells monitors the mean loss of a cycle that ends, and whether it is that of all calls."""
        prim.assign(self.last_mean_loss, mean_loss)
        prim.assign(self.knows_last_mean, prim.cast(self.knows_losses(), mstype.int32))

    def knows_losses(self):
        """Returns whether the loss of each call is known."""
        return prim.equal(self.missing_losses, self._no_call)

    def _or_one(self, weights):
        """Returns the weight of each loss, of which a ManualStep has one for all networks; 1 in the place of 0."""
        weights = prim.stack(weights[: self.losses.shape[0]])
        return prim.select(prim.greater(weights, ops.zeros_like(weights)), weights, ops.ones_like(weights))

    # In a checkpoint, the flags of several scales are one Parameter.

    def _stored(self, flags):
        return prim.stack(flags) if self._has_own_flags else flags[0]

    def _read(self, flags):
        return ops.unstack(flags) if self._has_own_flags else (flags,)

    def reset(self, after):
        """Empties the cycle once `after` is computed. A multiplication by 0 would keep a NaN."""
        gradients.map_each(ops.partial(_assign_zero, after), self.sums)
        gradients.map_each(ops.partial(_assign_false, after), self.flags)
        self.count.reset(after)


class DroppingCycle(Cycle):
    """
    A cycle some of whose calls are dropped. It also keeps how many were, whether any was not, and whose gradients were
    not finite.
    """

    def __init__(self, plan):
        super().__init__(plan)
        name = f"{plan.prefix}accumulation."
        self.dropped = state(f"{name}dropped_calls", np.int32(0))
        self.kept = state(f"{name}kept", False)
        self.not_finite = state(f"{name}not_finite", np.zeros(sum(map(len, self.gradients)), bool))
        self.flags = ParameterTuple([*self.flags, self.kept, self.not_finite])
        self.sums = ParameterTuple([*self.sums, self.dropped])

    def _bounds(self):
        must_be = "from 0 to the number of calls so far in its cycle"
        in_cycle = Bounds(self.dropped, must_be, lambda dropped, calls: 0 <= dropped <= max(calls, 0), self.count.value)
        return [*super()._bounds(), in_cycle]

    # Not by `super()`, which graph mode takes for that of the object's own class.
    found_in_cycle = Cycle._found

    def _found(self, call, flags):
        return self.found_in_cycle(call, flags) + (flags["kept"], flags["not_finite"])

    def drop(self, call, flags):
        """Counts a call that adds nothing but its flags. Returns what to wait for."""
        return self.note(call, flags), prim.assign_add(self.dropped, self._one_call), self.count.count()

    # Not by `super()`, either.
    knows_losses_of_calls = Cycle.knows_losses

    def knows_losses(self):
        """Returns whether a call was kept, and the loss of each that was is known."""
        return prim.logical_and(self.kept, self.knows_losses_of_calls())

    def is_kept(self, after):
        """Returns whether any call was kept, once `after` is computed."""
        return prim.deepcopy(ops.depend(self.kept, after))
