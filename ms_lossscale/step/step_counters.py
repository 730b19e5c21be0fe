"""How many steps were applied and skipped, and whose gradients overflowed in the last one that was skipped."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype


class StepCounters(nn.Cell):
    """
    Counts applied, skipped, and consecutively skipped steps in int32 Parameters, and remembers in a bool one which
    weights' gradients were not finite in the last step that was skipped.

    Args:
        weights (ParameterTuple): The weights.
        prefix (str): For the Parameters' names.
        counts_retries (bool): Whether steps are tried again.
    """

    def __init__(self, weights, prefix, counts_retries):
        super().__init__(auto_prefix=False)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._names = tuple(weight.name for weight in weights)
        self.applied_steps = self._state(prefix, "applied_steps", np.int32(0))
        self.skipped_steps = self._state(prefix, "skipped_steps", np.int32(0))
        self.consecutive_skipped_steps = self._state(prefix, "consecutive_skipped_steps", np.int32(0))
        self.overflowed = self._state(prefix, "overflowed", np.zeros(len(weights), bool))
        self._counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        self.counts_retries = counts_retries
        if counts_retries:
            self.retries = self._state(prefix, "retries", np.int32(0))
            self._counts.append("retries")

    @staticmethod
    def _state(prefix, name, value):
        return Parameter(Tensor(value), name=f"{prefix}step_counters.{name}", requires_grad=False)

    def none_applied(self):
        """Whether no step was applied yet, bool of shape ()."""
        return ops.equal(self.applied_steps, self._zero)

    def count_applied(self):
        ops.assign(self.consecutive_skipped_steps, self._zero)
        return ops.assign_add(self.applied_steps, self._one)

    def count_retry(self):
        return ops.assign(self.retries, self.retries + self._one)

    def count_skipped(self, are_finite):
        ops.assign(self.overflowed, ops.logical_not(are_finite))
        ops.assign(self.consecutive_skipped_steps, self.consecutive_skipped_steps + self._one)
        ops.assign(self.skipped_steps, self.skipped_steps + self._one)
        return self.skipped_steps

    def as_dict(self):
        """The counts as ints, by name."""
        return {name: int(getattr(self, name).asnumpy()) for name in self._counts}

    def steps_made(self):
        """The steps so far, skipped ones included."""
        counts = self.as_dict()
        return counts["applied_steps"] + counts["skipped_steps"]

    def shared_state(self):
        """The small Parameters that have the same values on all ranks."""
        # Not which gradients overflowed: of weights that are a rank's own, each rank knows its own.
        return [p for p in self.get_parameters() if p is not self.overflowed]

    def overflowed_parameters(self):
        """The names of the weights whose gradients were not finite in the last step that was skipped."""
        return [name for name, overflowed in zip(self._names, self.overflowed.asnumpy()) if overflowed]
