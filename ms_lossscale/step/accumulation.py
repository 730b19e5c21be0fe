"""A transaction whose step takes several calls, of which those that overflowed may be dropped."""

from typing import Optional

from mindspore import Tensor, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale._mindspore.graphs import MethodCell, only_if
from ms_lossscale.step.cycle import Cycle, DroppingCycle
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.records import Call, Flags, Gradients, Verdict
from ms_lossscale.step.transaction import Transaction


class AccumulatingTransaction(Transaction):
    """
    A step of N optimizers whose gradients come from the calls of an accumulation cycle. Each call is unscaled, checked
    and added up; the last one, or `flush`, ends the step.
    """

    cycle: Cycle

    def __init__(self, plan: StepPlan, cycle: Optional[Cycle] = None) -> None:
        super().__init__(plan, Cycle(plan) if cycle is None else cycle)

    def prepare_and_judge(self, call: Call, measures: bool = True) -> tuple[Gradients, Verdict]:
        """Unscales and checks a call. Returns its gradients, divided by the calls of a cycle, and the verdict."""
        grads = self.preparation.unscale(call["gradients"], call["scales"])  # 4. Unscale.
        return self.judge(grads, call, measures=False)

    def conclude(self, grads: Gradients, verdict: Verdict, call: Call) -> Tensor:
        """Ends a call that has been checked. Returns whether it is known that its cycle is skipped."""
        is_last = self.cycle.count.is_last()
        added = self.cycle.add(call, grads, self.flags_of_call(verdict, call))  # 5. Accumulate.
        if is_last:
            skipped = self.end_cycle(ops.depend(call["scales"], added), self.cycle.weights, call)
        else:
            skipped = self.cycle.has_overflowed(added)
            if "saved" in call:
                # At once: the next call's forward must not begin with what this one has spoilt.
                skipped = only_if(skipped, self.restore_step, call)
        return skipped

    def flags_of_call(self, verdict: Verdict, call: Call) -> Flags:
        """Returns what a cycle keeps of what was found in a call."""
        overflows = verdict["overflows"]
        forward_failed = () if self.patience is None else self.patience.forward_failed(call, verdict, overflows)
        causes = self.overflow_check.causes(call, verdict)
        return {"overflows": overflows, "causes": causes, "forward_failed": forward_failed}

    def flush(self) -> Tensor:
        """Ends a cycle before its last call. Returns whether it is skipped."""
        scales = ops.depend(self.scales.now(), self._all_parameters)
        if self.overflow_check.starts:  # Other work may have raised the register since the last call of the cycle.
            scales = self.overflow_check.detector.start(scales)
        # What transforms and conditions will write.
        saved = self.forward_state.copied()
        call: Call = {"saved": saved} if len(saved) > 0 else {}
        return self.end_cycle(ops.depend(scales, saved), self.cycle.sums_of_weights(), call)

    def end_cycle(self, scales: tuple[Tensor, ...], loss_weights: Optional[tuple], last_call: Call) -> Tensor:
        """Ends a cycle. Each network's gradients are divided by its sum of weights, if there are any."""
        grads = ops.depend(self.cycle.gradients, scales)
        if loss_weights is not None:
            grads = self.preparation.average(grads, gradients.copy(loss_weights), self.cycle.is_weighted)
        grads = self.preparation.prepare(grads)  # 6. Reduce across ranks, and transform.
        grads, verdict = self.verdict_of_cycle(grads, scales)
        mean_loss = self.cycle.mean_loss()
        self.cycle.tell(mean_loss)
        call: Call = {"scales": scales, "losses": (mean_loss,)}
        if "saved" in last_call:
            call["saved"] = last_call["saved"]
        if "is_watched" in last_call:
            call["is_watched"] = True
        return self.apply_or_undo(grads, verdict, call)

    def verdict_of_cycle(self, grads: Gradients, scales: tuple[Tensor, ...]) -> tuple[Gradients, Verdict]:
        """Checks the mean over the calls. Returns it, and the verdict, to which an overflow in any call counts."""
        grads, verdict = self.judge(grads, {"scales": scales})
        verdict["overflows"] = gradients.or_each(verdict["overflows"], self.cycle.overflows(scales))
        return grads, verdict

    def stand_still(self, verdict: Verdict, call: Call, overflows: tuple[Tensor, ...]) -> Optional[tuple[Tensor, ...]]:
        if self.patience is None:
            return None
        return gradients.and_each(overflows, self.on_any_rank(self.cycle.forward_failed()))

    def causes(self, verdict: Verdict, call: Call) -> tuple[Tensor, Tensor]:
        return self.cycle.causes()

    def restore_step(self, call: Call) -> tuple:
        """Undoes what the forwards of the cycle wrote. Returns what to wait for."""
        # Not by `super()`, which graph mode takes for that of the object's own class.
        done = self.forward_state.restore_call(call["saved"]) if "saved" in call else ()
        return self.forward_state.restore_cycle(done)

    def ended(self, done: Tensor) -> Tensor:
        """Empties the cycle. Returns what to wait for."""
        return ops.depend(done, self.cycle.reset(done))

    def lost_already(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Copies: PyNative mode can't stack Parameters with Tensors.
        return gradients.copy(self.cycle.overflows(scales))

    def discard(self) -> None:
        """Drops a cycle that has begun, in Python: what its forwards wrote is undone, and all that it added up."""
        self.forward_state.restore_cycle(())
        self.cycle.reset(self.counters.applied_steps)


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
        flags["not_finite"] = self.overflow_check.not_finite(verdict, grads)
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
            forward_failed = flags["forward_failed"]
            flags["overflows"] = gradients.and_each(verdict["overflows"], gradients.not_each(forward_failed))
            flags["forward_failed"] = gradients.and_each(verdict["overflows"], forward_failed)
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

    def verdict_of_cycle(self, grads: Gradients, scales: tuple[Tensor, ...]) -> tuple[Gradients, Verdict]:
        """Checks the mean over the calls that were not dropped. Returns it, and the verdict."""
        grads, verdict = self.judge(grads, {"scales": scales})
        (is_kept,) = self.on_any_rank((self.cycle.is_kept(scales),))
        is_kept = ops.depend(is_kept, self.norms.lose_unless(is_kept))
        not_finite = prim.logical_or(self.overflow_check.not_finite(verdict, grads), self.cycle.not_finite)
        seen = gradients.or_each(verdict["overflows"], self.cycle.overflows(scales))
        of_kept: Verdict = {
            "overflows": gradients.or_with(prim.logical_not(is_kept), verdict["overflows"]),
            "finite": (prim.logical_not(not_finite),),
            "seen_by_rules": self.on_any_rank(seen),
        }
        return grads, of_kept

    def seen_by_rules(self, verdict: Verdict, overflows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return verdict["seen_by_rules"]

    def stand_still(self, verdict: Verdict, call: Call, overflows: tuple[Tensor, ...]) -> Optional[tuple[Tensor, ...]]:
        if self.patience is None:
            return None
        # If one of them waits, this was no clean step of the others, either.
        waits = any_of(self.on_any_rank(self.cycle.forward_failed()))
        return gradients.and_with(waits, gradients.not_each(verdict["seen_by_rules"]))

    def lost_already(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()

    def discard(self) -> None:
        present = self.counters.dropped_calls
        prim.assign(present, prim.sub(present, self.cycle.dropped))
        super().discard()


def compiled_flush(transaction, in_one_graph):
    """Returns what ends the cycle that has begun, as one graph if `in_one_graph` makes one; None without cycles."""
    return None if transaction.cycle is None else in_one_graph(MethodCell(transaction.flush).construct)
