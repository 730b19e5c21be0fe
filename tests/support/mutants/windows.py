"""Ways to break what is counted: steps, tries, and the calls of a window."""

from support.mutants.mutant import Mutant

_SCALED = "test_scaled_train_one_step_cell.py"
_WINDOWS = "test_accumulation.py"
_FLUSH = "test_flush_accumulation.py"
_OWN_SCALES = "test_own_loss_scales.py"
_RETRIES = "test_retries.py"
_OVERFLOWED = "test_overflowed_parameters.py"
_DETECTOR = "test_overflow_detector.py"
_IN_FORWARD = "test_overflow_in_the_forward.py"

MUTANTS = [
    Mutant(
        "an applied step does not end a series of skipped ones",
        "step/step_counters.py",
        "        ops.assign(self.consecutive_skipped_steps, self._zero)\n",
        "",
        (_OVERFLOWED, _SCALED),
    ),
    Mutant(
        "skipped steps in a row are not counted on",
        "step/step_counters.py",
        "ops.assign(self.consecutive_skipped_steps, self.consecutive_skipped_steps + self._one)",
        "ops.assign(self.consecutive_skipped_steps, self._one)",
        (_SCALED, "test_loss_scale_monitor.py"),
    ),
    Mutant(
        "the weights that did not overflow are named",
        "step/step_counters.py",
        "ops.assign(self.overflowed, ops.logical_not(are_finite))",
        "ops.assign(self.overflowed, are_finite)",
        (_OVERFLOWED,),
    ),
    Mutant(
        "skipped steps are no steps",
        "step/step_counters.py",
        'return counts["applied_steps"] + counts["skipped_steps"]',
        'return counts["applied_steps"]',
        (_SCALED, "test_profile_scales.py"),
    ),
    Mutant(
        "at most one retry is counted",
        "step/step_counters.py",
        "ops.assign(self.retries, self.retries + self._one)",
        "ops.assign(self.retries, self._one)",
        (_RETRIES,),
    ),
    Mutant(
        "a step is tried without end",
        "step/tries.py",
        "left = left - self._one",
        "left = left - self._none",
        (_RETRIES,),
    ),
    Mutant(
        "a step is tried once too often",
        "step/tries.py",
        "while ops.logical_and(again, left > self._none):",
        "while ops.logical_and(again, left >= self._none):",
        (_RETRIES,),
    ),
    Mutant(
        "a try begins with what the last one wrote",
        "step/tries.py",
        "        self.forward_state.take_back(saved)\n",
        "",
        (_RETRIES,),
    ),
    Mutant(
        "a law is not put back after tries in vain",
        "step/tries.py",
        "            gradients.assign_where(failed, self.law, law)\n",
        "",
        (_RETRIES,),
    ),
    Mutant(
        "tries in vain blame those of the last one",
        "step/tries.py",
        "overflow = ops.select(failed, first_overflow, overflow)",
        "overflow = ops.select(failed, overflow, overflow)",
        (_OWN_SCALES, _RETRIES),
    ),
    Mutant(
        "a law goes on from the scale of the last try in vain",
        "step/tries.py",
        "law_scale = ops.select(failed, scale, used)",
        "law_scale = used",
        (_RETRIES,),
    ),
    Mutant(
        "a loss that no scale can mend is tried again",
        "step/tries.py",
        "hopeless = ops.logical_or(hopeless, ops.logical_not(gradients.finite((losses[i],))))",
        "pass",
        (_RETRIES,),
    ),
    Mutant(
        "a call of a lost window is tried again",
        "step/tries.py",
        "hopeless = ops.logical_or(hopeless, of_any_network(self.window_state.overflow))",
        "pass",
        (_RETRIES,),
    ),
    Mutant(
        "each rank tries again by itself",
        "step/tries.py",
        "ops.logical_not(self.ranks.agree(hopeless))",
        "ops.logical_not(hopeless)",
        ("test_configurations.py",),
    ),
    Mutant(
        "what the forward wrote is tried again at a lower scale",
        "step/tries.py",
        "hopeless = any_of(ops.logical_not(can_mend), overflows)",
        "hopeless = ops.logical_not(can_mend)",
        (_IN_FORWARD,),
    ),
    Mutant(
        "the register is not cleared before the forward",
        "step/tries.py",
        "inputs = self.overflow_detector.start(inputs)",
        "inputs = inputs",
        (_DETECTOR, "test_register_order.py"),
    ),
    Mutant(
        "a window's last call makes the step alone",
        "step/window.py",
        "self.packing.pack(gradients.add(self.state.gradients, self.packing.unpack(grads)))",
        "grads",
        (_WINDOWS,),
    ),
    Mutant(
        "a window is never emptied",
        "step/window.py",
        "            self.state.reset(overflow)\n        else:",
        "        else:",
        (_WINDOWS,),
    ),
    Mutant(
        "a NaN stays in the window",
        "_gradients.py",
        "ops.depend(ops.zeros_like(parameter), after)",
        "ops.depend(parameter * 0.0, after)",
        (_WINDOWS,),
    ),
    Mutant(
        "a window that overflowed skips the next one",
        "step/window.py",
        "ops.logical_and(self.overflow, gradients.never(ops.depend(self._zero, after)))",
        "ops.logical_or(self.overflow, gradients.never(ops.depend(self._zero, after)))",
        (_WINDOWS,),
    ),
    Mutant(
        "what a call of a window wrote stays until its end",
        "step/window.py",
        "            overflow = only_if(of_any_network(overflow), self.forward_state.restore, saved)\n",
        "            overflow = of_any_network(overflow)\n",
        (_IN_FORWARD,),
    ),
    Mutant(
        "a flushed window is averaged over a full one",
        "step/window.py",
        "return gradients.multiply(self.gradients, rest)",
        "return gradients.multiply(self.gradients, rest / rest)",
        (_FLUSH,),
    ),
    Mutant(
        "a flushed window forgets that a call overflowed",
        "step/window.py",
        "overflow = self.decision(grads, self._one, scale, (), (self.state.overflow,), ())",
        "overflow = self.decision(grads, self._one, scale, (), (), ())",
        (_FLUSH,),
    ),
    Mutant(
        "the register's past tells of a flushed window",
        "step/window.py",
        "self.overflow_detector.start(self.use_parameters(self.state.partial_mean()))",
        "self.use_parameters(self.state.partial_mean())",
        (_FLUSH,),
    ),
]
