"""Mutants of a step's state: forward state, averages, optimizers, stacked gradients, names, and ranks."""

from support.mutants.mutant import Mutant

_SCALED = "test_scaled_train_one_step_cell.py"
_CLIPPING = "test_clipping.py"
_AVERAGES = "test_moving_average.py"
_SIMULTANEOUS = "test_simultaneous_train_one_step_cell.py"
_OWN_SCALES = "test_own_loss_scales.py"
_WRITES = "test_what_the_forward_writes.py"
_IN_FORWARD = "test_overflow_in_the_forward.py"
_RANKS = "test_ranks.py"

MUTANTS = [
    Mutant(
        "what the forward wrote is not put back",
        "step/forward_state.py",
        "def restore_step(self, saved):\n        gradients.assign(self.written, saved)",
        "def restore_step(self, saved):\n        pass",
        (_IN_FORWARD,),
        frozenset({"a-skipped-step-leaves-every-parameter"}),
    ),
    Mutant(
        "what the forward writes is not copied before",
        "step/forward_state.py",
        "def save(self, inputs):\n        saved = gradients.copy(self.written)\n",
        "def save(self, inputs):\n        saved = tuple(self.written)\n",
        (_IN_FORWARD,),
    ),
    Mutant(
        "each call of a cycle copies what the forward writes",
        "step/forward_state.py",
        "only_if(self.state.count.is_first(), gradients.assign, self.copies, self.written)",
        "gradients.assign(self.copies, self.written)",
        ("test_accumulation.py",),
    ),
    Mutant(
        "what a cycle wrote is not put back",
        "step/forward_state.py",
        "gradients.assign(self.written, self.copies)",
        "gradients.assign(self.copies, self.written)",
        ("test_flush_accumulation.py", "test_accumulation.py"),
    ),
    Mutant(
        "what several networks write goes back though one of them was applied",
        "step/shared_state.py",
        "ops.logical_and(_any(skipped_wrote), ops.logical_not(_any(applied_wrote)))",
        "_any(skipped_wrote)",
        ("test_configurations.py",),
    ),
    Mutant(
        "what several networks write stays not finite until the end of the cycle",
        "step/shared_state.py",
        "            gradients.assign_where(became, self.shared, before)\n",
        "            gradients.assign_where(became, self.shared, self.shared)\n",
        ("test_configurations.py",),
    ),
    Mutant(
        "in a cycle, a transform that several networks use keeps what one that was skipped wrote",
        "step/shared_state.py",
        "gradients.assign_where(of_any_network(overflow), self.not_of_forward, its_before)",
        "gradients.assign_where(of_any_network(overflow), self.not_of_forward, self.not_of_forward)",
        ("test_gradient_transforms.py", "test_overflow_detector.py"),
    ),
    Mutant(
        "each alternating network has a Parameter of its own for a buffer that others have, too",
        "step/forward_state.py",
        'shared.parameter.name = f"{self._prefix}{shared.name}"',
        "shared.parameter.name = shared.name",
        ("test_alternating_train_one_step_cell.py",),
    ),
    Mutant(
        "what was not finite before is an overflow",
        "_gradients.py",
        "ops.logical_and(was, ops.logical_not(is_now))",
        "ops.logical_or(ops.logical_not(was), ops.logical_not(is_now))",
        (_IN_FORWARD,),
    ),
    Mutant(
        "an attempt in a cycle begins with what the last one wrote",
        "step/forward_state.py",
        "def restore_call(self, saved):\n        gradients.assign(self.written, saved)",
        "def restore_call(self, saved):\n        pass",
        ("test_retries.py", "test_forwards.py"),
    ),
    Mutant(
        "an average takes the wrong share",
        "step/update.py",
        "gradients.average(self._decay, self._rest,",
        "gradients.average(self._rest, self._decay,",
        (_AVERAGES,),
        frozenset({"averages-follow-the-weights"}),
    ),
    Mutant(
        "an average stands",
        "step/update.py",
        "return gradients.average(self._decay, self._rest, self.averages, self.weights)",
        "return self.averages[0]",
        (_AVERAGES,),
        frozenset({"averages-follow-the-weights", "a-skipped-step-leaves-every-parameter"}),
    ),
    Mutant(
        "the trained weights do not come back after an evaluation",
        "step/update.py",
        "trained = [(weight, ops.deepcopy(weight))",
        "trained = [(weight, weight)",
        (_AVERAGES,),
    ),
    Mutant(
        "an average begins with the weights of the construction",
        "step/update.py",
        "only_if(self.step_counters.none_applied(), moving_average.begin)",
        "pass",
        (_AVERAGES,),
    ),
    Mutant(
        "an average begins anew in each step",
        "step/update.py",
        "only_if(self.step_counters.none_applied(), moving_average.begin)",
        "moving_average.begin()",
        (_AVERAGES,),
    ),
    Mutant(
        "an average moves before what follows the update",
        "step/update.py",
        "        for after_update in self.after_update:\n"
        "            after_update()\n"
        "        for moving_average in self.moving_averages:\n"
        "            moving_average()\n",
        "        for moving_average in self.moving_averages:\n"
        "            moving_average()\n"
        "        for after_update in self.after_update:\n"
        "            after_update()\n",
        (_AVERAGES,),
    ),
    Mutant(
        "a skipped step's average moves",
        "step/step.py",
        "        done = self.undo(grads, flags, saved) if overflow else",
        "        if overflow:\n"
        "            for moving_average in self.update.moving_averages:\n"
        "                moving_average()\n"
        "        done = self.undo(grads, flags, saved) if overflow else",
        (_AVERAGES, "test_configurations.py"),
    ),
    Mutant(
        "a network takes the input before its own",
        "step/forward_backward.py",
        "taken += (inputs[position],)",
        "taken += (inputs[position - 1],)",
        (_SIMULTANEOUS,),
    ),
    Mutant(
        "what each network has is that of the first",
        "_gradients.py",
        "ops.unstack(value)[i] if value.ndim",
        "ops.unstack(value)[0] if value.ndim",
        (_OWN_SCALES,),
    ),
    Mutant(
        "an overflow must be told of by all that tell",
        "_gradients.py",
        "flag = ops.logical_or(flag, each)",
        "flag = ops.logical_and(flag, each)",
        (_IN_FORWARD,),
    ),
    Mutant(
        "weights of float16 get gradients of float32",
        "step/optimizers.py",
        "nn.Identity() if all_float32 else CastLike(weights=ParameterTuple(updated))",
        "nn.Identity()",
        (_SCALED, "test_float16_weights.py"),
    ),
    Mutant(
        "an optimizer that divides by itself is not refused",
        "step/optimizers.py",
        "    scale = _own_loss_scale(optimizer)\n    if scale != 1.0:",
        "    scale = _own_loss_scale(optimizer)\n    if scale < 0.0:",
        ("test_in_processes_of_their_own.py", "test_arguments.py"),
    ),
    Mutant(
        "the weights of several networks get other names",
        "step/optimizers.py",
        "(state for state in parameters if id(state) not in weights)",
        "parameters",
        ("test_names.py",),
    ),
    Mutant(
        "the learning rate of an experimental optimizer is in no checkpoint",
        "_mindspore.py",
        "if not isinstance(optimizer, experimental.optim.Optimizer):",
        "if isinstance(optimizer, experimental.optim.Optimizer):",
        ("test_resume.py",),
    ),
    Mutant(
        "optimizers get the gradients from the first weight on",
        "step/optimizers.py",
        "grads[self._slices[i][0] : self._slices[i][1]]",
        "grads[: self._slices[i][1] - self._slices[i][0]]",
        (_SIMULTANEOUS,),
    ),
    Mutant(
        "the wrong weights are named",
        "step/packing.py",
        'The flags in the order of the weights."""\n        return flags',
        'The flags in the order of the weights."""\n        return ops.flip(flags, (0,))',
        ("test_overflowed_parameters.py",),
        frozenset({"an-overflow-in-the-backward-is-seen"}),
    ),
    Mutant(
        "of stacked gradients the wrong weights are named",
        "step/packing.py",
        "return ops.gather(flags, self._order, 0)",
        "return flags",
        ("test_overflowed_parameters.py",),
    ),
    Mutant(
        "of stacked gradients the wrong network overflowed",
        "step/packing.py",
        "bisect.bisect_right(ends, place)",
        "bisect.bisect_left(ends, place)",
        (_OWN_SCALES,),
    ),
    Mutant(
        "a network's gradients are those of all before it, too",
        "step/packing.py",
        "return packed[self._parts[i][0] : self._parts[i][1]]",
        "return packed[: self._parts[i][1]]",
        (_CLIPPING, _OWN_SCALES),
    ),
    Mutant(
        "a prefix is put before a name twice",
        "step/optimizers.py",
        "if not parameter.name.startswith(prefix):",
        "if prefix:",
        ("test_names.py",),
    ),
    Mutant(
        "two parameters of one name are accepted",
        "step/optimizers.py",
        "if seen.setdefault(parameter.name, parameter) is not parameter:",
        "if seen.setdefault(parameter.name, parameter) is None:",
        ("test_names.py", _SIMULTANEOUS),
    ),
    Mutant(
        "gradients are not exchanged",
        "step/build.py",
        "[self.ranks.grad_reducer] if self.ranks.exchanges else []",
        "[]",
        ("test_data_parallel.py",),
        frozenset({"an-overflow-on-one-rank-skips-the-step-on-all"}),
        ranks=True,
    ),
    Mutant(
        "ranks do not agree",
        "step/ranks.py",
        "return self._all_reduce(overflow.astype(mstype.float32)) > self._zero",
        "return overflow",
        ("test_data_parallel.py",),
    ),
    Mutant(
        "a rank's own weights are taken for those of all",
        "step/ranks.py",
        "return tuple(weight.layerwise_parallel for weight in weights)",
        "return (False,) * len(weights)",
        ("test_data_parallel.py",),
    ),
]
