"""A transaction whose step takes several calls, of which those that overflowed are dropped."""

from mindspore import ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale.step.accumulation import AccumulatingTransaction
from ms_lossscale.step.cycle import DroppingCycle


class DroppingTransaction(AccumulatingTransaction):
    """
    A step of an accumulation cycle. A call that overflowed is undone, and adds nothing: its weight is 0. So the step is
    the mean over the other calls, and ranks need not agree on which they drop. The update rules see an overflow of any
    call at the end of the cycle, also if the step is applied. If all calls of all ranks were dropped, it is skipped.
    """

    def __init__(self, plan):
        super().__init__(plan, DroppingCycle(plan))

    def end(self, grads, verdict, call):
        """Ends a call that has been checked. Returns whether it is dropped; the last, whether the step is skipped."""
        is_last = self.cycle.count.is_last()
        is_dropped = any_of(verdict["overflows"])
        flags = self.flags_of_call(verdict, call)
        if self.patience is not None:
            counts = gradients.not_each(flags["stand_still"])
            flags["overflows"] = gradients.and_each(verdict["overflows"], counts)
            flags["stand_still"] = gradients.and_each(verdict["overflows"], flags["stand_still"])
        flags["kept"] = prim.logical_not(is_dropped)
        flags["not_finite"] = self._not_finite(verdict, grads)
        added = self._add_or_drop(is_dropped, grads, call, flags)
        return self._finish_if(is_last, is_dropped, ops.depend(call["scales"], added), call)

    def _add_or_drop(self, is_dropped, grads, call, flags):
        if is_dropped:
            undone = self.forward_state.restore_call(call["saved"]) if "saved" in call else ()
            done = self.counters.count_dropped((undone, self.cycle.drop(call, flags)))
        else:
            done = ops.depend(self.counters.dropped_calls, self.cycle.add(call, grads, flags))
        return done

    def _finish_if(self, is_last, is_dropped, scales, call):
        return self.finish(scales, self.cycle.weights, call) if is_last else ops.depend(is_dropped, scales)

    def _not_finite(self, verdict, grads):
        """Returns for each gradient whether it is not finite, bool of shape (n,)."""
        finite = verdict["finite"] if "finite" in verdict else self.overflow_check.each_finite(grads)
        return prim.logical_not(finite[0] if len(finite) == 1 else prim.concat(finite))

    def verdict_of_cycle(self, grads, scales):
        """Returns the verdict on the mean over the calls that were not dropped."""
        verdict = self.overflow_check.find(grads, self.update.measure(grads), {})  # 7. One overflow check.
        (is_kept,) = self.agreed((self.cycle.is_kept(scales),))
        is_lost = prim.logical_or(any_of(verdict["overflows"]), prim.logical_not(is_kept))
        not_finite = prim.logical_or(self._not_finite(verdict, grads), self.cycle.not_finite)
        seen = gradients.or_each(verdict["overflows"], self.cycle.overflows(scales))
        return {
            "overflows": (is_lost,) * len(seen),
            "finite": (prim.logical_not(not_finite),),
            "seen_by_rules": self.agreed(seen),
        }

    def discard(self):
        present = self.counters.dropped_calls
        prim.assign(present, prim.sub(present, self.cycle.dropped))
        super().discard()

    def lost_already(self, scales):
        return ()

    def seen_by_rules(self, verdict, overflows):
        return verdict["seen_by_rules"]

    def stand_still(self, verdict, call, overflows):
        if self.patience is None:
            return None
        return gradients.and_each(self.agreed(self.cycle.stand_still()), gradients.not_each(verdict["seen_by_rules"]))
