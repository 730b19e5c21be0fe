"""A transaction whose step takes several calls, of which those that overflowed are dropped."""

from typing import Optional

from mindspore import Tensor, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale.step.accumulation import AccumulatingTransaction
from ms_lossscale.step.cycle import DroppingCycle
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.records import Call, Flags, Gradients, Verdict


class DroppingTransaction(AccumulatingTransaction):
    """
    A step of an accumulation cycle. A call that overflowed is undone, and adds nothing: its weight is 0. So the step is
    the mean over the other calls, and ranks need not agree on which they drop. The update rules see an overflow of any
    call at the end of the cycle, also if the step is applied. If all calls of all ranks were dropped, it is skipped.
    """

    cycle: DroppingCycle

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan, DroppingCycle(plan))

    def conclude(self, grads: Gradients, verdict: Verdict, call: Call) -> Tensor:
        """Ends a call that has been checked. Returns whether it is dropped; the last, whether the step is skipped."""
        is_last = self.cycle.count.is_last()
        is_dropped = any_of(verdict["overflows"])
        flags = self.flags_of_dropped_call(verdict, call)
        flags["kept"] = prim.logical_not(is_dropped)
        flags["not_finite"] = self._not_finite(verdict, grads)
        added = self._add_or_drop(is_dropped, grads, call, flags)
        scales = ops.depend(call["scales"], added)
        return self._end_cycle_if(is_last, is_dropped, scales, call)

    def flags_of_dropped_call(self, verdict: Verdict, call: Call) -> Flags:
        """
        Returns what the cycle keeps of a call. Its own forward's overflow does not count for a scale that stands still
        then, but that of another call still does.
        """
        flags = self.flags_of_call(verdict, call)
        if self.patience is not None:
            forward_overflowed = flags["stand_still"]
            flags["overflows"] = gradients.and_each(verdict["overflows"], gradients.not_each(forward_overflowed))
            flags["stand_still"] = gradients.and_each(verdict["overflows"], forward_overflowed)
        return flags

    # Methods of their own, since graph mode compiles a branch with what comes after it.

    def _add_or_drop(self, is_dropped, grads, call, flags):
        if is_dropped:
            undone = self.forward_state.restore_call(call["saved"]) if "saved" in call else ()
            done = self.counters.count_dropped((undone, self.cycle.drop(call, flags)))
        else:
            done = ops.depend(self.counters.dropped_calls, self.cycle.add(call, grads, flags))
        return done

    def _end_cycle_if(self, is_last, is_dropped, scales, call):
        return self.end_cycle(scales, self.cycle.weights, call) if is_last else ops.depend(is_dropped, scales)

    def _not_finite(self, verdict, grads):
        """Returns for each gradient whether it is not finite, bool of shape (n,)."""
        finite = verdict["finite"] if "finite" in verdict else self.overflow_check.each_finite(grads)
        return prim.logical_not(finite[0] if len(finite) == 1 else prim.concat(finite))

    def verdict_of_cycle(self, grads: Gradients, scales: tuple[Tensor, ...]) -> Verdict:
        """Returns the verdict on the mean over the calls that were not dropped."""
        verdict = self.overflow_check.find(grads, self.update.measure(grads), {})  # 7. One overflow check.
        (is_kept,) = self.on_any_rank((self.cycle.is_kept(scales),))
        not_finite = prim.logical_or(self._not_finite(verdict, grads), self.cycle.not_finite)
        seen = gradients.or_each(verdict["overflows"], self.cycle.overflows(scales))
        return {
            "overflows": gradients.or_with(prim.logical_not(is_kept), verdict["overflows"]),
            "finite": (prim.logical_not(not_finite),),
            "seen_by_rules": self.on_any_rank(seen),
        }

    def seen_by_rules(self, verdict: Verdict, overflows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return verdict["seen_by_rules"]

    def stand_still(self, verdict: Verdict, call: Call, overflows: tuple[Tensor, ...]) -> Optional[tuple[Tensor, ...]]:
        if self.patience is None:
            return None
        # If one of them waits, this was no clean step of the others, either.
        waits = any_of(self.on_any_rank(self.cycle.stand_still()))
        return gradients.and_with(waits, gradients.not_each(verdict["seen_by_rules"]))

    def lost_already(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()

    def discard(self) -> None:
        present = self.counters.dropped_calls
        prim.assign(present, prim.sub(present, self.cycle.dropped))
        super().discard()
