"""Counts the steps: those that were applied, and those that were skipped, by reason."""

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, of_count
from ms_lossscale._gradients import of_any_network
from ms_lossscale._own_shape_only import load_own_shape_only


class StepCounters(Bounded, nn.Cell):
    """
    Counts applied, skipped and consecutively skipped steps, and retries if there are any, in int32 Parameters. A bool
    Parameter tells which weights' gradients were not finite in the last step that was skipped.

    Each skipped step also counts for one reason, the first of these: a condition asked for it; a loss was not finite;
    what the forward wrote was not; gradients were not; none of these, so that a detector alone told of an overflow.

    Args:
        weights (list[ParameterTuple]): The weights of each network.
        prefix (str): What the names begin with.
        counts_retries (bool): Whether there are retries.
        counts_conditions (bool): Whether there are conditions.
    """

    def __init__(self, weights, prefix, counts_retries, counts_conditions):
        super().__init__(auto_prefix=False)
        self._prefix = f"{prefix}step_counters."
        self._zero, self._one, self._yes = Tensor(0, mstype.int32), Tensor(1, mstype.int32), Tensor(True)
        self._names = [weight.name for its in weights for weight in its]
        self.applied_steps = self._state("applied_steps", np.int32(0))
        self.skipped_steps = self._state("skipped_steps", np.int32(0))
        self.consecutive_skipped_steps = self._state("consecutive_skipped_steps", np.int32(0))
        # A diagnosis, not a state: those of other weights are not loaded.
        self.overflowed = load_own_shape_only(self._state("overflowed", np.zeros(len(self._names), bool)))
        self._counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        self.counts_retries, self.counts_conditions = counts_retries, counts_conditions
        if counts_retries:
            self.retries = self._state("retries", np.int32(0))
            self._counts.append("retries")
        if counts_conditions:
            self.skipped_by_condition = self._state("skipped_by_condition", np.int32(0))
            self._counts.append("skipped_by_condition")
        self.skipped_by_loss = self._state("skipped_by_loss", np.int32(0))
        self.skipped_by_forward_state = self._state("skipped_by_forward_state", np.int32(0))
        # Of several networks, each whose gradients were not finite counts.
        networks = len(weights)
        self.skipped_by_gradients = self._state(
            "skipped_by_gradients", np.zeros(networks if networks > 1 else (), np.int32)
        )
        self.skipped_by_detector = self._state("skipped_by_detector", np.int32(0))
        self.reasons = ["loss", "forward_state", "gradients", "detector"]
        network_of_weight = np.repeat(np.arange(networks), [len(its) for its in weights])
        self._of_networks = Tensor(network_of_weight == np.arange(networks)[:, None]) if networks > 1 else None

    def _state(self, name, value):
        return Parameter(Tensor(value), name=f"{self._prefix}{name}", requires_grad=False)

    def bounds(self):
        return [of_count(its) for its in (*(getattr(self, name) for name in self._counts), *self.of_reasons())]

    def of_reasons(self):
        """Returns the Parameters that count skipped steps by reason, other than a condition."""
        return [getattr(self, f"skipped_by_{reason}") for reason in self.reasons]

    def none_applied(self):
        """Returns whether no step has been applied yet, bool of shape ()."""
        return prim.equal(self.applied_steps, self._zero)

    def count_applied(self):
        prim.assign(self.consecutive_skipped_steps, self._zero)
        return prim.assign_add(self.applied_steps, self._one)

    def count_retry(self):
        return prim.assign(self.retries, self.retries + self._one)

    def count_skipped(self, are_finite, losses, state, by_condition):
        """
        Counts a step that is skipped: which weights' gradients are finite, which losses are not, whether what the
        forward wrote is not, and, where there are conditions, whether one asked for it.
        """
        overflowed = prim.logical_not(are_finite)
        prim.assign(self.overflowed, overflowed)
        is_left = self._yes
        for asked in by_condition:
            is_left = prim.logical_not(asked)
            self._count(self.skipped_by_condition, asked)
        is_left = self._count_one(self.skipped_by_loss, is_left, prim.reduce_any(losses, ()))
        is_left = self._count_one(self.skipped_by_forward_state, is_left, state)
        if self._of_networks is None:
            is_left = self._count_one(self.skipped_by_gradients, is_left, prim.reduce_any(overflowed, ()))
        else:
            of_networks = prim.reduce_any(prim.logical_and(overflowed, self._of_networks), (1,))
            is_left = self._count_one(self.skipped_by_gradients, is_left, of_networks)
        self._count(self.skipped_by_detector, is_left)
        prim.assign(self.consecutive_skipped_steps, self.consecutive_skipped_steps + self._one)
        prim.assign(self.skipped_steps, self.skipped_steps + self._one)
        return self.skipped_steps

    def _count_one(self, counter, is_left, flag):
        """Counts a step that no earlier reason counts for. Returns whether it is still to be counted."""
        self._count(counter, prim.logical_and(is_left, flag))
        return prim.logical_and(is_left, prim.logical_not(of_any_network(flag)))

    def _count(self, counter, flag):
        prim.assign(counter, counter + flag.astype(mstype.int32))

    def as_dict(self):
        """Returns the counts as ints, by name."""
        return {name: int(getattr(self, name).asnumpy()) for name in self._counts}

    def reasons_as_dict(self):
        """Returns how many steps were skipped for each reason, a list of ints where networks share the verdict."""
        reasons = (["condition"] if self.counts_conditions else []) + self.reasons
        return {reason: getattr(self, f"skipped_by_{reason}").asnumpy().tolist() for reason in reasons}

    def steps_made(self):
        """Returns the number of steps so far, skipped ones included."""
        counts = self.as_dict()
        return counts["applied_steps"] + counts["skipped_steps"]

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        # What a rank found itself may differ from what others found.
        own = [self.overflowed, *self.of_reasons()]
        return [parameter for parameter in self.get_parameters() if not any(parameter is its for its in own)]

    def overflowed_parameters(self):
        """Returns the names of the weights whose gradients were not finite in the last step that was skipped."""
        return [name for name, overflowed in zip(self._names, self.overflowed.asnumpy()) if overflowed]
