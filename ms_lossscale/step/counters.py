"""How many steps there were, why they were skipped, and what else a monitor tells of."""

import itertools

import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._values import Bounded, of_count, state

# Why a step was skipped. The first that holds counts.
REASONS = ("condition", "loss", "forward_state", "gradients", "detector")
# What happens to steps and calls. Those at the beginning, and only they, end a step.
ENDS = (*REASONS, "applied")
EVENTS = (*ENDS, "not_begun", "dropped", "retried")


def _one_of(event):
    return Tensor(np.array([name == event for name in EVENTS], np.int32))


class StepCounters(Bounded, nn.Cell):
    """
    Counts applied, skipped and consecutively skipped steps, and retries if there are any, in int32 Parameters. A bool
    Parameter tells which weights' gradients were not finite in the last step that was skipped, and an int32 one, of
    shape :math:`(5,)`, how many steps were skipped for each reason.

    For monitors, `events` counts what has happened in this process. Nothing that is loaded or discarded changes it, so
    that what is new in it since the last look has happened since. Of an applied step it tells only where a call may
    also end without one.
    """

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        weights = list(itertools.chain(*plan.weights))
        name = f"{plan.prefix}step_counters."
        self._zero = Tensor(0, mstype.int32)
        self._one = Tensor(1, mstype.int32)
        # Hidden from MindSpore: they belong to the networks.
        object.__setattr__(self, "_weights", tuple(weights))
        self._of_others = ()
        self.applied_steps = state(f"{name}applied_steps", np.int32(0))
        self.skipped_steps = state(f"{name}skipped_steps", np.int32(0))
        self.consecutive_skipped_steps = state(f"{name}consecutive_skipped_steps", np.int32(0))
        # A diagnosis, not a state: hidden from checkpoints, which other weights may load.
        object.__setattr__(self, "overflowed", state(f"{name}overflowed", np.zeros(len(weights), bool)))
        object.__setattr__(self, "events", state(f"{name}events", np.zeros(len(EVENTS), np.int32)))
        self.tells_applied = plan.may_end_no_step
        self._applied = _one_of("applied")
        self._not_begun = _one_of("not_begun")
        self._dropped = _one_of("dropped")
        self._retried = _one_of("retried")
        self.skip_reasons = state(f"{name}skip_reasons", np.zeros(len(REASONS), np.int32))
        self._counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        self.counts_retries = plan.settings.max_retries > 0
        self.counts_conditions = len(plan.settings.skip_conditions) > 0
        self.counts_not_begun = plan.is_manual
        if self.counts_retries:
            self.retries = state(f"{name}retries", np.int32(0))
            self._counts.append("retries")
        self.counts_dropped = plan.settings.drop_overflowed_calls
        if self.counts_dropped:
            self.dropped_calls = state(f"{name}dropped_calls", np.int32(0))
            self._counts.append("dropped_calls")
        # The numbers of the reasons that are asked; the last one is what remains.
        first = 0 if self.counts_conditions else 1
        last = len(REASONS) - 1
        self._numbers = Tensor(np.arange(len(EVENTS), dtype=np.int32))
        self._asked = Tensor(np.arange(first, last, dtype=np.int32))
        self._rest = Tensor(np.full(last - first, last, np.int32))

    def _bounds(self):
        return [*(of_count(getattr(self, name)) for name in self._counts), of_count(self.skip_reasons)]

    def count_with(self, others):
        """Counts a step that any of these counters has applied for the first one, too."""
        # Hidden: these Parameters belong to the others.
        object.__setattr__(self, "_of_others", ParameterTuple(counters.applied_steps for counters in others))

    def none_applied(self):
        """Returns whether no step has been applied yet, bool of shape ()."""
        none = prim.equal(self.applied_steps, self._zero)
        for applied_steps in self._of_others:
            none = prim.logical_and(none, prim.equal(applied_steps, self._zero))
        return none

    def count_applied(self):
        if self.tells_applied:
            prim.assign_add(self.events, self._applied)
        prim.assign(self.consecutive_skipped_steps, self._zero)
        # Not the value of the Assign: MindSpore 2.7 warns where a branch returns it.
        return ops.depend(self.applied_steps, prim.assign_add(self.applied_steps, self._one))

    def count_dropped(self, after):
        """Counts a call of a cycle that is dropped, once `after` is computed."""
        prim.assign_add(self.events, self._dropped)
        return ops.depend(self.dropped_calls, prim.assign_add(self.dropped_calls, ops.depend(self._one, after)))

    def count_retry(self):
        prim.assign_add(self.events, self._retried)
        return prim.assign_add(self.retries, self._one)

    def count_skipped(self, overflowed, causes):
        """
        Counts a step that is skipped: which gradients are not finite; whether a condition skips, if there are any,
        whether a loss, and whether what the forward wrote, was not finite.
        """
        prim.assign(self.overflowed, overflowed)
        flags = prim.stack((*causes, prim.reduce_any(overflowed, ())))
        first = prim.reduce_min(prim.select(flags, self._asked, self._rest), ())
        counted = prim.cast(prim.equal(self._numbers, first), mstype.int32)
        prim.assign_add(self.events, counted)
        prim.assign_add(self.skip_reasons, prim.slice(counted, (0,), (len(REASONS),)))
        prim.assign_add(self.consecutive_skipped_steps, self._one)
        return ops.depend(self.skipped_steps, prim.assign_add(self.skipped_steps, self._one))

    def count_not_begun(self):
        """Counts, as skipped for no other reason, a step that ends and has not begun. Returns what to wait for."""
        prim.assign(self.overflowed, gradients.false_like(self.overflowed))
        prim.assign_add(self.events, self._not_begun)
        prim.assign_add(self.consecutive_skipped_steps, self._one)
        return prim.assign_add(self.skipped_steps, self._one)

    def as_dict(self):
        """Returns the counts, ints by name."""
        counts = {name: int(getattr(self, name).asnumpy()) for name in self._counts}
        if self.counts_conditions:
            counts["skipped_by_condition"] = int(self.skip_reasons.asnumpy()[0])
        return counts

    def reasons(self):
        """Returns how many steps were skipped for each reason, ints by name."""
        reasons = dict(zip(REASONS, self.skip_reasons.asnumpy().tolist()))
        if self.counts_not_begun:
            # They have no place in the Parameter, so that checkpoints are those of training cells.
            reasons["not_begun"] = int(self.skipped_steps.asnumpy()) - sum(reasons.values())
        if not self.counts_conditions:
            del reasons["condition"]
        return reasons

    def steps_made(self):
        """Returns the number of steps so far, skipped ones included."""
        return int(self.applied_steps.asnumpy()) + int(self.skipped_steps.asnumpy())

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        # Not the reasons, which differ for weights of which each rank has its own part, nor calls that a rank dropped.
        own = [self.skip_reasons, self.dropped_calls] if self.counts_dropped else [self.skip_reasons]
        return [parameter for parameter in self.get_parameters() if not any(parameter is each for each in own)]

    def overflowed_parameters(self):
        """Returns the names of the weights whose gradients were not finite in the last step that was skipped."""
        return [weight.name for weight, overflowed in zip(self._weights, self.overflowed.asnumpy()) if overflowed]
