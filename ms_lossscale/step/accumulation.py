"""A transaction whose step takes several calls."""

from mindspore import ops

from ms_lossscale import _gradients as gradients
from ms_lossscale._gradients import any_of
from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale.step.cycle import Cycle
from ms_lossscale.step.transaction import Transaction


class AccumulatingTransaction(Transaction):
    """
    A step of N optimizers whose gradients come from the calls of an accumulation cycle. Each call is unscaled, checked
    and added up; the last one, or `flush`, ends the step.
    """

    def __init__(self, plan, cycle=None):
        super().__init__(plan, Cycle(plan) if cycle is None else cycle)

    def check(self, call, measures=True):
        """Unscales and checks a call. Returns its gradients, divided by the calls of a cycle, and the verdict."""
        grads = self.preparation.unscale(call["gradients"], call["scales"])  # 4. Unscale.
        evidence = self.overflow_check.evidence(call, self.forward_state)
        return grads, self.overflow_check.find(grads, None, evidence)

    def end(self, grads, verdict, call):
        """Ends a call that has been checked. Returns whether it is known that its cycle is skipped."""
        is_last = self.cycle.count.is_last()
        added = self.cycle.add(call, grads, self.flags_of_call(verdict, call))  # 5. Accumulate.
        if is_last:
            skipped = self.finish(ops.depend(call["scales"], added), self.cycle.weights, call)
        else:
            skipped = any_of(self.cycle.overflows(added))
            if "saved" in call:
                skipped = only_if(skipped, self.restore_step, call)
        return skipped

    def flags_of_call(self, verdict, call):
        """Returns what a cycle keeps of what was found in a call."""
        causes = self.overflow_check.causes(call, verdict, self.counters.skipped_steps)
        flags = {"overflows": verdict["overflows"], "causes": causes}
        if self.patience is not None:
            flags["stand_still"] = self.patience.stand_still(call, verdict, verdict["overflows"])
        return flags

    def flush(self):
        """Ends a cycle before its last call. Returns whether it is skipped."""
        scales = self.use_parameters(self.scales.now())
        if self.overflow_check.starts:  # Other work may have raised the register since the last call of the cycle.
            scales = self.overflow_check.detector.start(scales)
        return self.finish(scales, self.cycle.sums_of_weights(), {})

    def finish(self, scales, loss_weights, last_call):
        """Ends a cycle. Each network's gradients are divided by its sum of weights, if there are any."""
        grads = self.cycle.gradients_after(scales)
        if loss_weights is not None:
            grads = self.preparation.average(grads, gradients.copy(loss_weights), self.cycle.is_weighted)
        grads = self.preparation.prepare(grads)  # 6. Reduce across ranks, transform, and measure norms.
        verdict = self.verdict_of_cycle(grads, scales)
        call = {"scales": scales, "losses": self.cycle.mean_loss()}
        if "saved" in last_call:
            call["saved"] = last_call["saved"]
        skipped = self.decide(grads, verdict, call)
        return ops.depend(skipped, self.cycle.reset(skipped))

    def verdict_of_cycle(self, grads, scales):
        """Returns the verdict on the mean over the calls, to which an overflow in any of them counts."""
        verdict = self.overflow_check.find(grads, self.update.measure(grads), {})  # 7. One overflow check.
        verdict["overflows"] = gradients.or_each(verdict["overflows"], self.cycle.overflows(scales))
        return verdict

    def stand_still(self, verdict, call, overflows):
        if self.patience is None:
            return None
        return gradients.and_each(overflows, self.agreed(self.cycle.stand_still()))

    def lost_already(self, scales):
        return self.cycle.overflows(scales)

    def causes(self, verdict, call):
        return self.cycle.causes()

    def restore_step(self, call):
        """Undoes what the forwards of the cycle wrote. Returns what to wait for."""
        # Not by `super()`, which graph mode takes for that of the object's own class.
        done = self.forward_state.restore_call(call["saved"]) if "saved" in call else ()
        return self.forward_state.restore_cycle(done)

    def discard(self):
        """Drops a cycle that has begun, in Python: what its forwards wrote is undone, and all that it added up."""
        self.forward_state.restore_cycle(())
        self.cycle.reset(self.counters.applied_steps)
