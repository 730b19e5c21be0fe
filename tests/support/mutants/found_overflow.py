"""Mutants of the overflow check, the order of events, and the scale within a step."""

from support.mutants.mutant import Mutant

_SCALED = "test_scaled_train_one_step_cell.py"
_CYCLES = "test_accumulation.py"
_FLUSH = "test_flush_accumulation.py"
_OWN_SCALES = "test_own_loss_scales.py"
_RETRIES = "test_retries.py"
_RANKS = "test_ranks.py"
_SET_IN_CYCLE = "test_scale_set_within_a_cycle.py"
_OVERFLOWED = "test_overflowed_parameters.py"
_DETECTOR = "test_overflow_detector.py"
_IN_FORWARD = "test_overflow_in_the_forward.py"

# The checks that fail if no overflow is found, except one that clips by the norm, which shows it anyway.
BLIND = frozenset(
    {
        "an-overflow-in-the-forward-is-seen",
        "an-overflow-in-the-backward-is-seen",
        "finite-steps-are-not-flagged",
        "a-skipped-step-lowers-the-scale-at-once",
        "phases-are-told-apart",
        "networks-share-one-overflow-check",
        "a-retry-saves-the-batch",
        "what-no-scale-can-mend-is-skipped",
    }
)
_UNSCALED = frozenset({"gradients-are-divided-by-the-scale", "accumulated-gradients-are-averaged"})

MUTANTS = [
    Mutant(
        "no overflow is seen",
        "step/found_overflow.py",
        "        found = (ops.logical_not(ops.ReduceAll()(are_finite)),)\n"
        "        return self.agreed(found, grads, (are_finite,), others, known)",
        "        found = (ops.ReduceAny()(ops.logical_and(are_finite, ops.logical_not(are_finite))),)\n"
        "        return self.agreed(found, grads, (are_finite,), (), known)",
        (_OVERFLOWED,),
        BLIND,
    ),
    Mutant(
        "the gradients tell, and not what the forward wrote",
        "step/found_overflow.py",
        "return self.agreed(found, grads, (are_finite,), others, known)",
        "return self.agreed(found, grads, (are_finite,), (), known)",
        (_IN_FORWARD,),
    ),
    Mutant(
        "a step that overflowed updates",
        "step/step.py",
        "done = self.undo(grads, flags, saved) if overflow else self.update(grads)",
        "done = self.update(grads)",
        (_OVERFLOWED,),
        frozenset(
            {
                "a-skipped-step-leaves-every-parameter",
                "an-overflow-in-the-backward-is-seen",
                "networks-share-one-overflow-check",
                "what-no-scale-can-mend-is-skipped",
            }
        ),
    ),
    Mutant(
        "what the forward wrote tells of no overflow",
        "step/forward_state.py",
        "return became_not_finite(saved, self.written, self._judged)",
        "return ()",
        (_IN_FORWARD,),
    ),
    Mutant(
        "what the forwards of a cycle wrote tells of no overflow",
        "step/forward_state.py",
        "return became_not_finite(self.copies, self.written, self._judged)",
        "return ()",
        (_IN_FORWARD,),
    ),
    Mutant(
        "where a detector shows it none overflowed",
        "step/found_overflow.py",
        "ops.logical_and(overflow, ops.logical_or(overflowed, none_did))",
        "ops.logical_and(overflow, ops.logical_and(overflowed, ops.logical_not(none_did)))",
        (_OWN_SCALES,),
    ),
    Mutant(
        "the other networks overflowed",
        "step/found_overflow.py",
        "networks == np.unique(networks)[:, None]",
        "networks != np.unique(networks)[:, None]",
        (_OWN_SCALES,),
    ),
    Mutant(
        "a call of a cycle forgets those before it",
        "step/step.py",
        "overflow = self.found_in_call(grads, (), others, known)[0]",
        "overflow = self.found_in_call(grads, (), others, ())[0]",
        (_CYCLES,),
    ),
    Mutant(
        "the last call of a cycle forgets those before it",
        "step/found_overflow.py",
        "return self.ranks.agree(any_of((overflow,) + known)), flags",
        "return self.ranks.agree(overflow), flags",
        (_CYCLES,),
    ),
    Mutant(
        "a norm at a cycle's end forgets the calls before it",
        "step/found_overflow.py",
        "return self.agreed(found, grads, (), others, known)",
        "return self.agreed(found, grads, (), others, ())",
        (_IN_FORWARD,),
    ),
    Mutant(
        "a retried cycle forgets the calls before it",
        "step/found_overflow.py",
        "return any_of(known), ()",
        "return known[0], ()",
        (_RETRIES, "test_configurations.py"),
    ),
    Mutant(
        "ranks do not agree on what the detector finds",
        "step/found_overflow.py",
        "return self.ranks.agree(any_of((overflow,) + known)), flags",
        "return any_of((overflow,) + known), flags",
        (_RANKS,),
    ),
    Mutant(
        "the first network's norm decides for all",
        "step/found_overflow.py",
        "for is_finite in norms_finite:",
        "for is_finite in norms_finite[:1]:",
        ("test_clipping.py", "test_simultaneous_train_one_step_cell.py", "test_configurations.py"),
    ),
    Mutant(
        "where a norm is measured what the forward wrote tells of nothing",
        "step/found_overflow.py",
        "return self.agreed(found, grads, (), others, known)",
        "return self.agreed(found, grads, (), (), known)",
        (_IN_FORWARD,),
    ),
    Mutant(
        "a user's detector must answer in a shape of ()",
        "step/found_overflow.py",
        "            overflow = overflow.reshape(())\n",
        "",
        (_DETECTOR,),
    ),
    Mutant(
        "the scale stands still",
        "step/step.py",
        "        self.scaling.adjust(scale, overflow)  # 8. One update of the scale.\n",
        "",
        (_SCALED,),
    ),
    Mutant(
        "a step reports the scale of its first attempt",
        "step/step.py",
        "losses, auxes, backward, scale = self.attempts(scale, inputs, saved)",
        "losses, auxes, backward, _ = self.attempts(scale, inputs, saved)",
        (_RETRIES,),
    ),
    Mutant(
        "the loss scales of the others are told to be at their floor",
        "step/step.py",
        "any(weight.name in overflowed for weight in its)",
        "any(weight.name not in overflowed for weight in its)",
        (_OWN_SCALES,),
    ),
    Mutant(
        "the scale that is reported is no copy",
        "step/scaling.py",
        "return gradients.copy(self.loss_scale.scale_value)",
        "return self.loss_scale.scale_value",
        (_SCALED,),
    ),
    Mutant(
        "the update rule is told the opposite of what was found",
        "step/scaling.py",
        "ops.assign(self.loss_scale.scale_value, self.loss_scale.advance(scale, overflow))",
        "ops.assign(self.loss_scale.scale_value, self.loss_scale.advance(scale, ops.logical_not(overflow)))",
        (_OVERFLOWED, _SCALED),
    ),
    Mutant(
        "no step is tried again",
        "step/scaling.py",
        "return ops.logical_and(overflow, self.loss_scale.can_back_off(scale))",
        "return ops.logical_and(overflow, ops.logical_not(overflow))",
        (_RETRIES,),
        frozenset({"a-retry-saves-the-batch"}),
    ),
    Mutant(
        "gradients are not divided",
        "step/scaling.py",
        "return gradients.multiply(grads, self._share / scale), self._one",
        "return gradients.multiply(grads, self._share), self._one",
        ("test_tiny_gradients.py", _SCALED),
        _UNSCALED | {"averages-follow-the-weights"},
    ),
    Mutant(
        "a cycle is not averaged",
        "step/scaling.py",
        "return gradients.multiply(grads, self._share / scale), self._one",
        "return gradients.multiply(grads, self._one / scale), self._one",
        (_CYCLES,),
        frozenset({"accumulated-gradients-are-averaged"}),
    ),
    Mutant(
        "a gradient is divided in float16",
        "_gradients.py",
        "return _times(_to(tensor, mstype.float32), factor)",
        "return _to(_times(_to(tensor, mstype.float16), _to(factor, mstype.float16)), mstype.float32)",
        ("test_tiny_gradients.py", _SCALED),
        _UNSCALED | {"float16-gradients-are-divided-in-float32", "clipping-takes-the-norm-of-unscaled-gradients"},
    ),
    Mutant(
        "each network's gradients are divided by the first one's scale",
        "step/scaling.py",
        "self._share / its_scale)",
        "self._share / ops.unstack(scale)[0])",
        (_OWN_SCALES,),
    ),
    Mutant(
        "a scale that is set within a cycle is used at once",
        "step/scaling.py",
        "scale = ops.select(self.cycle_state.count.is_first(), self.loss_scale.scale_value, self.cycle_scale)",
        "scale = self.loss_scale.scale_value",
        (_SET_IN_CYCLE,),
    ),
    Mutant(
        "a scale that is set within a cycle is lost",
        "step/scaling.py",
        "ops.assign(present, ops.select(is_set, present, next_scale))",
        "ops.assign(present, next_scale)",
        (_SET_IN_CYCLE,),
    ),
    Mutant(
        "a scale that is set to what it was within a cycle is moved",
        "step/scaling.py",
        "is_set = ops.logical_or(self._is_set(), ops.not_equal(present, scale))",
        "is_set = ops.not_equal(present, scale)",
        (_SET_IN_CYCLE,),
    ),
    Mutant(
        "a retry forgets that the scale was set within the cycle",
        "step/scaling.py",
        "ops.assign(self.cycle_scale, ops.select(is_set, -next_scale, next_scale))",
        "ops.assign(self.cycle_scale, next_scale)",
        (_SET_IN_CYCLE, "test_configurations.py"),
    ),
    Mutant(
        "a retry moves the scale that was set within the cycle",
        "step/scaling.py",
        "ops.assign(present, ops.select(is_next, present, next_scale))",
        "ops.assign(present, next_scale)",
        (_SET_IN_CYCLE, "test_configurations.py"),
    ),
    Mutant(
        "a cycle's gradients may become subnormal",
        "step/scaling.py",
        "loss_scale.limit(steps)",
        "loss_scale.limit(1)",
        ("test_range_of_scales.py",),
    ),
    Mutant(
        "an overflow moves the update rules of those that did not overflow",
        "step/scaling.py",
        "moves = ops.logical_or(overflow, ops.logical_not(of_any_network(overflow)))",
        "moves = ops.logical_or(overflow, ops.logical_not(overflow))",
        (_OWN_SCALES, "test_configurations.py"),
    ),
    Mutant(
        "a retry lowers the scales of all",
        "step/scaling.py",
        "overflowed = of_network(i, overflow)",
        "overflowed = of_any_network(overflow)",
        (_OWN_SCALES,),
    ),
    Mutant(
        "a step is tried again though one of those that overflowed can't go lower",
        "step/scaling.py",
        "return ops.logical_and(of_any_network(overflow), ops.ReduceAll()(of_each))",
        "return ops.logical_and(of_any_network(overflow), ops.ReduceAny()(of_each))",
        (_OWN_SCALES, "test_configurations.py"),
    ),
]
