"""The two branches that a step can end in, and what they change besides weights: the averages and the counters."""

import contextlib

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, of_count
from ms_lossscale._mindspore import forget_failed_calls, only_if, write_in_place
from ms_lossscale._own_shape_only import load_own_shape_only
from ms_lossscale.step.optimizers import Optimizers
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.stage import Clipping, ForwardState


class MovingAverage(nn.Cell):
    """
    Computes `ema = decay * ema + (1 - decay) * weight` for one optimizer's weights, in float32. It starts from the
    weights as they are at the first applied update, so also from loaded ones.
    """

    def __init__(self, decay, weights):
        super().__init__(auto_prefix=False)
        self.weights = weights
        self.averages = ParameterTuple(
            Parameter(ops.deepcopy(weight).astype(mstype.float32), name=f"ema.{weight.name}", requires_grad=False)
            for weight in weights
        )
        self._decay = Tensor(decay, mstype.float32)
        self._rest = Tensor(1.0 - decay, mstype.float32)

    def begin(self):
        """Copies the present weights."""
        return gradients.assign(self.averages, gradients.cast_like(self.weights, self.averages))

    def construct(self):
        """Updates the averages, after the weights."""
        return gradients.average(self._decay, self._rest, self.averages, self.weights)

    def as_dict(self):
        """Returns the averages, Parameters, by the weights' names."""
        return {weight.name: average for weight, average in zip(self.weights, self.averages)}


@contextlib.contextmanager
def averages_in_place(moving_averages):
    """A context in which the weights hold their averages. It always puts the trained weights back, exactly."""
    forget_failed_calls()
    pairs = [pair for average in moving_averages for pair in zip(average.weights, average.averages)]
    trained = [(weight, ops.deepcopy(weight)) for weight, _ in pairs]
    try:
        write_in_place(pairs)
        yield
    finally:
        write_in_place(trained)


class StepCounters(Bounded, nn.Cell):
    """
    Counts applied, skipped and consecutively skipped steps, and retries if there are any, in int32 Parameters. A bool
    Parameter tells which weights' gradients were not finite in the last step that was skipped.
    """

    def __init__(self, weights, prefix, counts_retries):
        super().__init__(auto_prefix=False)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._names = tuple(weight.name for weight in weights)
        self.applied_steps = self._state(prefix, "applied_steps", np.int32(0))
        self.skipped_steps = self._state(prefix, "skipped_steps", np.int32(0))
        self.consecutive_skipped_steps = self._state(prefix, "consecutive_skipped_steps", np.int32(0))
        # A diagnosis, not a state: those of other weights are not loaded.
        self.overflowed = load_own_shape_only(self._state(prefix, "overflowed", np.zeros(len(weights), bool)))
        self._counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        self.counts_retries = counts_retries
        if counts_retries:
            self.retries = self._state(prefix, "retries", np.int32(0))
            self._counts.append("retries")

    @staticmethod
    def _state(prefix, name, value):
        return Parameter(Tensor(value), name=f"{prefix}step_counters.{name}", requires_grad=False)

    def bounds(self):
        return [of_count(getattr(self, name)) for name in self._counts]

    def none_applied(self):
        """Returns whether no step has been applied yet, bool of shape ()."""
        return prim.equal(self.applied_steps, self._zero)

    def count_applied(self):
        prim.assign(self.consecutive_skipped_steps, self._zero)
        return prim.assign_add(self.applied_steps, self._one)

    def count_retry(self):
        return prim.assign(self.retries, self.retries + self._one)

    def count_skipped(self, are_finite):
        prim.assign(self.overflowed, prim.logical_not(are_finite))
        prim.assign(self.consecutive_skipped_steps, self.consecutive_skipped_steps + self._one)
        prim.assign(self.skipped_steps, self.skipped_steps + self._one)
        return self.skipped_steps

    def as_dict(self):
        """Returns the counts as ints, by name."""
        return {name: int(getattr(self, name).asnumpy()) for name in self._counts}

    def steps_made(self):
        """Returns the number of steps so far, skipped ones included."""
        counts = self.as_dict()
        return counts["applied_steps"] + counts["skipped_steps"]

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        # Without `overflowed`, which differs for weights of which each rank has its own part.
        return [p for p in self.get_parameters() if p is not self.overflowed]

    def overflowed_parameters(self):
        """Returns the names of the weights whose gradients were not finite in the last step that was skipped."""
        return [name for name, overflowed in zip(self._names, self.overflowed.asnumpy()) if overflowed]


class Update(nn.Cell):
    """
    Does all that happens in a step without overflow. Returns a Tensor to wait for, as :class:`Undo` does.
    `after_update` is a list of one cell or none.
    """

    def __init__(
        self,
        clipping: Clipping,
        packing: Packing,
        optimizers: Optimizers,
        after_update: list[nn.Cell],
        moving_averages: list[MovingAverage],
        step_counters: StepCounters,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.packing = packing
        self.optimizers = optimizers
        self.after_update = nn.CellList(after_update, auto_prefix=False)
        self.moving_averages = nn.CellList(moving_averages, auto_prefix=False)
        self.step_counters = step_counters

    def construct(self, grads):
        for moving_average in self.moving_averages:
            only_if(self.step_counters.none_applied(), moving_average.begin)
        self.optimizers(self.packing.unpack(self.clipping(grads)))
        for after_update in self.after_update:
            after_update()
        for moving_average in self.moving_averages:
            moving_average()
        return self.step_counters.count_applied()


class Undo(nn.Cell):
    """
    Does all that happens in a step that overflowed. It takes the gradients, `flags` (which of them are finite, or an
    empty tuple if the check did not find it), and `saved` (what the forward wrote, as it was before).
    """

    def __init__(self, forward_state: ForwardState, packing: Packing, step_counters: StepCounters) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.packing = packing
        self.step_counters = step_counters

    def construct(self, grads, flags, saved):
        self.forward_state.restore_step(saved)
        are_finite = flags[0] if flags else self.packing.each_finite(grads)
        return self.step_counters.count_skipped(self.packing.by_weight(are_finite))
