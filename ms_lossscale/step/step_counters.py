"""Counts the steps: those that were applied, and those that were skipped, by reason."""

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, of_count
from ms_lossscale._own_shape_only import load_own_shape_only

# Why a step was skipped. The first that holds counts.
REASONS = ("condition", "loss", "forward_state", "gradients", "detector")


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
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._names = tuple(weight.name for weight in weights)
        self.applied_steps = self._state(prefix, "applied_steps", np.int32(0))
        self.skipped_steps = self._state(prefix, "skipped_steps", np.int32(0))
        self.consecutive_skipped_steps = self._state(prefix, "consecutive_skipped_steps", np.int32(0))
        # A diagnosis, not a state: those of other weights are not loaded.
        self.overflowed = load_own_shape_only(self._state(prefix, "overflowed", np.zeros(len(weights), bool)))
        self.skip_reasons = self._state(prefix, "skip_reasons", np.zeros(len(REASONS), np.int32))
        self._counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        self.counts_retries, self.counts_conditions = counts_retries, counts_conditions
        if counts_retries:
            self.retries = self._state(prefix, "retries", np.int32(0))
            self._counts.append("retries")
        self._yes, self._no = Tensor(True), Tensor(False)
        self._numbers = Tensor(np.arange(len(REASONS), dtype=np.int32))
        self._many = Tensor(np.full(len(REASONS), len(REASONS), np.int32))

    @staticmethod
    def _state(prefix, name, value):
        return Parameter(Tensor(value), name=f"{prefix}step_counters.{name}", requires_grad=False)

    def bounds(self):
        return [*(of_count(getattr(self, name)) for name in self._counts), of_count(self.skip_reasons)]

    def none_applied(self):
        """Returns whether no step has been applied yet, bool of shape ()."""
        return prim.equal(self.applied_steps, self._zero)

    def count_applied(self):
        prim.assign(self.consecutive_skipped_steps, self._zero)
        return prim.assign_add(self.applied_steps, self._one)

    def count_retry(self):
        return prim.assign(self.retries, self.retries + self._one)

    def count_skipped(self, are_finite, loss, state, by_condition):
        """
        Counts a step that is skipped: which weights' gradients are finite, whether a loss is not, whether what the
        forward wrote is not, and, where there are conditions, a tuple of whether one asked for it.
        """
        overflowed = prim.logical_not(are_finite)
        prim.assign(self.overflowed, overflowed)
        asked = by_condition[0] if self.counts_conditions else self._no
        flags = prim.stack((asked, loss, state, prim.reduce_any(overflowed, ()), self._yes))
        first = prim.reduce_min(prim.select(flags, self._numbers, self._many), ())
        counted = prim.cast(prim.equal(self._numbers, first), mstype.int32)
        prim.assign(self.skip_reasons, self.skip_reasons + counted)
        prim.assign(self.consecutive_skipped_steps, self.consecutive_skipped_steps + self._one)
        prim.assign(self.skipped_steps, self.skipped_steps + self._one)
        return self.skipped_steps

    def as_dict(self):
        """Returns the counts as ints, by name."""
        counts = {name: int(getattr(self, name).asnumpy()) for name in self._counts}
        if self.counts_conditions:
            counts["skipped_by_condition"] = self.reasons()["condition"]
        return counts

    def reasons(self):
        """Returns how many steps were skipped for each reason, ints by name."""
        reasons = dict(zip(REASONS, self.skip_reasons.asnumpy().tolist()))
        if not self.counts_conditions:
            del reasons["condition"]
        return reasons

    def steps_made(self):
        """Returns the number of steps so far, skipped ones included."""
        counts = self.as_dict()
        return counts["applied_steps"] + counts["skipped_steps"]

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        # Not what differs for weights of which each rank has its own part.
        own = (self.overflowed, self.skip_reasons)
        return [parameter for parameter in self.get_parameters() if not any(parameter is its for its in own)]

    def overflowed_parameters(self):
        """Returns the names of the weights whose gradients were not finite in the last step that was skipped."""
        return [name for name, overflowed in zip(self._names, self.overflowed.asnumpy()) if overflowed]
