"""What of a training step does not depend on its networks: how it begins, and that it happens as a whole or not."""

from typing import Optional

from mindspore import Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale._memory_in_use import hide_all_parameters
from ms_lossscale.step.counters import StepCounters
from ms_lossscale.step.cycle import Cycle
from ms_lossscale.step.forward_state import make_forward_state
from ms_lossscale.step.norms import Norms
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.preparation import Preparation
from ms_lossscale.step.records import Call, Gradients, Verdict
from ms_lossscale.step.scales import Patience, Scales
from ms_lossscale.step.update import Update
from ms_lossscale.step.verdict import Conditions, OverflowCheck
from ms_lossscale.step.watch import Watch


class Transaction(nn.Cell):
    """
    A step of N optimizers, without the forward and backward.

    1. Read the scale once. 2. Copy what the forward will write. 3. (Forward and backward.) 4. Unscale. 5. (Check and
    accumulate each call: :class:`AccumulatingTransaction`.) 6. Divide by the weights of losses, reduce across ranks,
    transform, and measure norms. 7. One overflow check, and conditions. 8. One update of the scale. 9. One branch: clip
    and update, or undo.

    Where nothing before the update needs unscaled gradients, and no scale is below 1, event 4 is part of event 9, where
    it is one multiplication with the clipping's. Scaled gradients are then finite if and only if unscaled ones are.

    `records.py` says what calls and verdicts are. What a setting does not ask for is None or False, and the code for it
    is not in the graph.
    """

    def __init__(self, plan: StepPlan, cycle: Optional[Cycle] = None) -> None:
        super().__init__(auto_prefix=False)
        self.cycle = cycle
        self.ranks = plan.ranks
        self.checks = plan.checks
        self.may_skip = plan.may_skip
        self.scales = Scales(plan, cycle)
        self.overflow_check = OverflowCheck(plan)
        self.forward_state = make_forward_state(plan, self.overflow_check.detector, cycle)
        self.preparation = Preparation(plan)
        self.norms = Norms(plan)
        self._not_scaled = (None,) * len(plan.optimizers)
        self._may_unscale_in_update = plan.may_unscale_in_update
        self.unscales_in_update = self.may_unscale_in_update()
        self.conditions = Conditions(plan) if plan.settings.skip_conditions else None
        self.patience = Patience(plan) if plan.is_patient else None
        self.update = Update(plan, self.norms)
        self.counters = StepCounters(plan)
        self.watch = Watch(plan, self.counters) if plan.is_manual else None
        hide_all_parameters(self)

    def begin(self, inputs: tuple) -> tuple:
        """Begins a call. Returns its scales, the inputs, which wait for what is copied, and the copies."""
        scales = self.scales.read()  # 1. Read the scale once.
        inputs, saved = self.forward_state(inputs)  # 2. Copy what the forward will write.
        return scales, inputs, saved

    def end_of_call(self, call: Call) -> Tensor:
        """Ends a call. Returns whether its step is skipped."""
        return self.conclude(*self.prepare_and_judge(call), call)

    def prepare_and_judge(self, call: Call, measures: bool = True) -> tuple[Gradients, Verdict]:
        """Prepares and checks the gradients of a call. Returns them, and the verdict."""
        grads = call["gradients"]
        grads = grads if self.unscales_in_update else self.preparation.unscale(grads, call["scales"])  # 4. Unscale.
        # 6. Divide by the weights of losses, reduce across ranks, and transform.
        grads = self.preparation.average(grads, call["loss_weights"]) if "loss_weights" in call else grads
        grads = self.preparation.prepare(grads)
        return self.judge(grads, call, measures)

    def judge(self, grads: Gradients, call: Call, measures: bool = True) -> tuple[Gradients, Verdict]:
        """Measures norms, and checks for overflow. Returns the gradients, and the verdict."""
        overflow_check = self.overflow_check
        measures = measures and self.norms.measures_any
        norms_finite = None
        if measures and overflow_check.norms_suffice:
            norms_finite = self.norms.measure(grads, self.factors(call))
        found = overflow_check.look_at(grads, norms_finite)  # 7. One overflow check.
        if overflow_check.starts:  # What is computed of gradients could set a register that has not been read.
            grads = gradients.once(found["overflowed"], grads)
        if measures and not overflow_check.norms_suffice:
            self.norms.measure(grads, self.factors(call))
        return grads, overflow_check.judge(grads, found, call, self.forward_state)

    def factors(self, call: Call) -> tuple[Optional[Tensor], ...]:
        """Returns what is still to unscale the gradients of each network, None if they are unscaled."""
        return self.preparation.factors(call["scales"]) if self.unscales_in_update else self._not_scaled

    def may_unscale_in_update(self) -> bool:
        """Returns whether event 4 may be part of event 9 at the present loss scales."""
        return self._may_unscale_in_update and self.scales.are_at_least_one()

    def conclude(self, grads: Gradients, verdict: Verdict, call: Call) -> Tensor:
        """Ends a call that has been checked. Returns whether its step is skipped."""
        return self.apply_or_undo(grads, verdict, call)

    def apply_or_undo(self, grads: Gradients, verdict: Verdict, call: Call) -> Tensor:
        """Ends a step. Returns whether it is skipped."""
        overflows = self.on_any_rank(verdict["overflows"]) if self.checks else verdict["overflows"]
        skips = any_of(overflows)
        skips = prim.logical_or(skips, call["not_begun"]) if "not_begun" in call else skips
        seen_by_rules = self.seen_by_rules(verdict, overflows)
        stands_still = self.stand_still(verdict, call, overflows)
        if self.conditions is not None:  # 7. Conditions, where nothing overflowed.
            asked = self.conditions.ask(skips, call["losses"], grads, self.factors(call)[0])
            asked["skips"] = self.on_any_rank((asked["skips"],))[0]
            skips = prim.logical_or(skips, asked["skips"])
            stands_still = self.conditions.stand_still(asked, seen_by_rules, stands_still)
            call["asked"] = asked
        law = (call["scales"], seen_by_rules, stands_still)
        if "not_begun" in call:
            return self._apply_or_undo_if_begun(skips, grads, verdict, call, law)
        self.scales.advance(*law)  # 8. One update of the scale.
        if not self.may_skip:
            return ops.depend(skips, self._apply(grads, call))
        return self._apply_or_undo(skips, grads, verdict, call)

    def _apply_or_undo(self, skips, grads, verdict, call):
        # 9. One branch. It returns its condition, which is no Parameter: else MindSpore waits for the device once more
        # on an NPU, and its GE refuses the branch. Nor is it computed there, which MindSpore may keep for ever.
        if skips:
            done = ops.depend(skips, self._undo(grads, verdict, call))
        else:
            done = ops.depend(skips, self._apply(grads, call))
        return done

    def _apply_or_undo_if_begun(self, skips, grads, verdict, call, law):
        """Events 8 and 9 where the call may not have begun. Such calls are so rare that one branch tells of both."""
        if skips:
            done = ops.depend(skips, self._undo_if_begun(call["not_begun"], grads, verdict, call, law))
        else:
            grads = ops.depend(grads, self.scales.advance(*law))
            done = ops.depend(skips, self._apply(grads, call))
        return done

    def _undo_if_begun(self, not_begun, grads, verdict, call, law):
        if not_begun:
            done = ops.depend(self.norms.restore(call["norms"]), self.watch.count_not_begun())
            done = ops.depend(not_begun, done)
        else:
            grads = ops.depend(grads, self.scales.advance(*law))
            done = ops.depend(not_begun, self._undo(grads, verdict, call))
        return done

    def _apply(self, grads, call):
        done = self.update.apply(grads, self.factors(call), self.counters.none_applied())
        done = ops.depend(self.counters.count_applied(), done)
        return self.ended(self.conditions.observe(call["asked"], done) if "asked" in call else done)

    def _undo(self, grads, verdict, call):
        causes = self.on_any_rank(self.causes(verdict, call))
        if "asked" in call:
            causes = (call["asked"]["skips"], *causes)
        done = self.counters.count_skipped(self.overflow_check.not_finite(verdict, grads), causes)
        done = self.watch.tell(done) if "is_watched" in call else done
        # There may be nothing to restore, and graph mode warns of a call that does nothing if nobody uses its result.
        return self.ended(ops.depend(done, self.restore_step(call)))

    # What differs where a step takes several calls.

    def seen_by_rules(self, verdict: Verdict, overflows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns for each scale whether its update rule sees an overflow."""
        return overflows

    def stand_still(self, verdict: Verdict, call: Call, overflows: tuple[Tensor, ...]) -> Optional[tuple[Tensor, ...]]:
        """Returns for each scale whether the forward's own overflow keeps it from falling, None if none can."""
        if self.patience is None:
            return None
        return gradients.and_each(overflows, self.on_any_rank(self.patience.forward_failed(call, verdict, overflows)))

    def causes(self, verdict: Verdict, call: Call) -> tuple[Tensor, Tensor]:
        """Returns whether a loss, and whether what the forward wrote, was not finite."""
        return self.overflow_check.causes(call, verdict)

    def restore_step(self, call: Call) -> tuple:
        """Undoes what the forward wrote. Returns what to wait for."""
        return self.forward_state.restore_call(call["saved"]) if "saved" in call else ()

    def ended(self, done: Tensor) -> Tensor:
        """
        Ends a step in its branch, once `done` is computed. Returns what to wait for. MindSpore keeps, for ever, what is
        used both before and after a branch within a branch, as that of a cycle is.
        """
        return done

    def lost_already(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns flags of whether the step is skipped whatever this call of it finds, once `scales` are computed."""
        return ()

    def on_any_rank(self, flags: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns for each flag whether it is True on any rank."""
        if self.ranks is None:
            return flags
        return self.ranks.agree(flags)

    def has_begun(self) -> bool:
        """Returns whether an accumulation cycle has begun."""
        return self.cycle is not None and self.cycle.count.has_begun()
