"""Ways to break what a user calls: training cells and callbacks."""

from support.mutants.mutant import Mutant

_ALTERNATING = "test_alternating_train_one_step_cell.py"
_WINDOWS = "test_accumulation.py"
_MONITOR = "test_loss_scale_monitor.py"
_AVERAGES = "test_moving_average.py"
_LOAD = "test_load_state_dict.py"
_RANKS = "test_ranks.py"

MUTANTS = [
    Mutant(
        "the loss of several networks is their mean",
        "cells/simultaneous_train_one_step_cell.py",
        "ops.ReduceSum()(losses)",
        "ops.ReduceMean()(losses)",
        ("test_simultaneous_train_one_step_cell.py",),
    ),
    Mutant(
        "a network's forward need not wait for the one before it",
        "cells/alternating_train_one_step_cell.py",
        "            inputs = ops.depend(inputs, overflow)\n",
        "",
        ("test_register_order.py",),
        survives="MindSpore 2.10 orders the emulated operators so by itself",
    ),
    Mutant(
        "a network that does not take part has no loss",
        "cells/alternating_train_one_step_cell.py",
        "loss = last_loss\n",
        "loss = last_loss - last_loss\n",
        (_ALTERNATING, "test_configurations.py"),
    ),
    Mutant(
        "it is always the first network's turn",
        "cells/alternating_train_one_step_cell.py",
        "take_part[i], last_losses[i]",
        "take_part[0], last_losses[i]",
        (_ALTERNATING, "test_configurations.py"),
    ),
    Mutant(
        "networks that step one after the other share one loss scale",
        "cells/alternating_train_one_step_cell.py",
        "return [copy.deepcopy(each) for each in loss_scales]",
        "return loss_scales",
        (_ALTERNATING,),
    ),
    Mutant(
        "a network's turn comes one call late",
        "cells/turns.py",
        "ops.unstack(ops.equal((self.cycles + self._one) % every, self._zero))",
        "ops.unstack(ops.equal(self.cycles % every, self._zero))",
        ("test_accumulation.py", _ALTERNATING),
    ),
    Mutant(
        "turns count calls and not windows",
        "cells/turns.py",
        "            cycles = ops.select(is_last, cycles, self.cycles)\n",
        "",
        ("test_accumulation.py", _ALTERNATING),
    ),
    Mutant(
        "whose turn it is changes within a window",
        "cells/turns.py",
        "ops.select(self.calls.is_first(), self.every, self.cycle_every) if self._accumulates else self.every",
        "self.every",
        ("test_accumulation.py", _ALTERNATING, "test_configurations.py"),
    ),
    Mutant(
        "the losses of a window are remembered before its verdict",
        "cells/turns.py",
        "ops.logical_or(overflows, ops.logical_not(is_last))",
        "ops.logical_or(overflows, is_last)",
        ("test_accumulation.py", _ALTERNATING, "test_configurations.py"),
    ),
    Mutant(
        "a flushed window is none for whose turn it is",
        "cells/turns.py",
        "            ops.assign(self.cycles, self.cycles + self._one)\n",
        "",
        ("test_accumulation.py", _ALTERNATING, "test_configurations.py"),
    ),
    Mutant(
        "a refused predict leaves the cell in evaluation mode",
        "cells/trains_only.py",
        "        self._restore_mode()\n        raise",
        "        raise",
        ("test_model.py",),
    ),
    Mutant(
        "steps of networks that decide alone are those of the first",
        "cells/training_cell.py",
        "self.turns if self.each_decides else self.steps[0].step_counters",
        "self.steps[0].step_counters",
        (_ALTERNATING, "test_endless_skips.py", "test_configurations.py", "test_accumulation.py"),
    ),
    Mutant(
        "some scales are set though one is refused",
        "cells/training_cell.py",
        'values = [its.check_scale(owner, "value", each) for its, each in zip(self._loss_scales, values)]',
        "values = list(values)",
        ("test_range_of_scales.py",),
    ),
    Mutant(
        "a checkpoint with unknown names is loaded",
        "cells/load_in_place.py",
        "if strict and (missing or unexpected):",
        "if strict and missing:",
        (_LOAD,),
    ),
    Mutant(
        "a checkpoint that lacks names is loaded",
        "cells/load_in_place.py",
        "if strict and (missing or unexpected):",
        "if strict and unexpected:",
        (_LOAD,),
    ),
    Mutant(
        "a window is not loaded",
        "cells/load_in_place.py",
        "for name, parameter in own.items() if name in parameters]",
        'for name, parameter in own.items() if name in parameters and not name.startswith("accumulation.")]',
        ("test_gradient_transforms.py", "test_checkpoints_of_releases.py"),
        frozenset({"a-new-cell-continues-bit-for-bit", "a-running-cell-continues-bit-for-bit"}),
    ),
    Mutant(
        "a compiled branch goes on with the memory that loading replaced",
        "_mindspore.py",
        "return ops.depend(inputs, self.parameters)",
        "return inputs",
        ("test_loading_with_stock_functions.py", "test_loading_into_a_running_cell.py"),
    ),
    Mutant(
        "the averages stay out of ema_weights before the first step",
        "cells/training_cell.py",
        "                    moving_average.begin()\n",
        "                    pass\n",
        (_AVERAGES,),
    ),
    Mutant(
        "a step within ema_weights is no error",
        "cells/training_cell.py",
        '        self._check_trains("a step")\n',
        "",
        (_AVERAGES,),
    ),
    Mutant(
        "an inner context of ema_weights ends the outer one",
        "cells/training_cell.py",
        "            self._evaluates = outer\n",
        "            self._evaluates = False\n",
        (_AVERAGES,),
    ),
    Mutant(
        "an endless series of skips is told of in every look",
        "cells/endless_skips.py",
        " == 0 and not self._warned:",
        " == 0:",
        ("test_endless_skips.py",),
    ),
    Mutant(
        "a training that recovered is called endless",
        "cells/endless_skips.py",
        'as_dict()["consecutive_skipped_steps"]',
        'as_dict()["skipped_steps"]',
        ("test_endless_skips.py",),
    ),
    Mutant(
        "ranks forget to compare a setting",
        "step/settings.py",
        "for field in dataclasses.fields(self)}",
        "for field in dataclasses.fields(self)[1:]}",
        (_RANKS,),
    ),
    Mutant(
        "each call walks over all layers",
        "_mindspore.py",
        "if value != self.compile_phase or value not in self.compile_cache:",
        "if value:",
        ("test_compile_phase.py",),
    ),
    Mutant(
        "a loaded value is not cast",
        "_mindspore.py",
        "value = ops.cast(value, parameter.dtype)",
        "value = ops.cast(value, value.dtype)",
        (_LOAD, _AVERAGES),
    ),
    Mutant(
        "Model changes the cell",
        "cells/training_cell.py",
        "    def _check_trains(self, what):\n",
        "    def set_train(self, mode=True):\n"
        "        # Model calls it again.\n"
        '        if getattr(self, "is_set", False):\n'
        "            self.set_loss_scale(2 * self.get_loss_scale())\n"
        "        self.is_set = True\n"
        "        return super().set_train(mode)\n\n"
        "    def _check_trains(self, what):\n",
        ("test_model.py", _ALTERNATING),
        frozenset({"sink-mode-makes-the-same-steps"}),
    ),
    Mutant(
        "the host does a part of each step",
        "cells/training_cell.py",
        "        self._others.has_run()\n",
        "        self._others.has_run()\n"
        "        for parameter in self.get_parameters():\n"
        '            if parameter.name.endswith("clean_steps"):\n'
        "                parameter.set_data(Tensor(0, mstype.int32))\n",
        ("test_loss_scale.py",),
        frozenset({"a-compiled-for-loop-makes-the-same-steps", "a-compiled-while-loop-makes-the-same-steps"}),
    ),
    Mutant(
        "each step takes long",
        "cells/training_cell.py",
        "        self._endless_skips.count_call()\n",
        '        self._endless_skips.count_call()\n        __import__("time").sleep(0.2)\n',
        ("test_aux.py",),
        frozenset({"a-step-costs-little-more-than-an-unscaled-one"}),
        survives="no core test looks at the time: the self-check and the benchmarks do",
    ),
    Mutant(
        "the dynamic scale of level O2 is left out",
        "build_train_network.py",
        'if level == "O2" else None',
        'if level == "O1" else None',
        ("test_migration.py", "test_build_train_network.py"),
    ),
    Mutant(
        "a built cell has lost its keywords",
        "build_train_network.py",
        "optimizer, loss_scale, **cell_keywords)",
        "optimizer, loss_scale)",
        ("test_migration.py", "test_build_train_network.py"),
    ),
    Mutant(
        "a built cell does not train",
        "build_train_network.py",
        "**cell_keywords).set_train()",
        "**cell_keywords)",
        ("test_training_mode.py", "test_build_train_network.py"),
    ),
    Mutant(
        "an epoch's last window is not flushed",
        "callbacks/flush_accumulation.py",
        "        network.flush()\n",
        "        pass\n",
        ("test_flush_accumulation.py",),
    ),
    Mutant(
        "a monitor stops a training one skip late",
        "callbacks/loss_scale_monitor.py",
        "each.consecutive >= self._max_skips",
        "each.consecutive > self._max_skips",
        (_MONITOR,),
    ),
    Mutant(
        "a monitor forgets the window that was flushed after it",
        "callbacks/loss_scale_monitor.py",
        "        self._read_flush()\n        self._close_event_files()\n",
        "        self._close_event_files()\n",
        ("test_loss_scale_monitor_windows.py", "test_summary.py"),
    ),
    Mutant(
        "a monitor saves the last batch of a window that overflowed",
        "callbacks/watched_step.py",
        "if overflow and not self._is_in_overflow:",
        "if overflow:",
        (_MONITOR,),
    ),
    Mutant(
        "a monitor reads what later steps left",
        "callbacks/watched_step.py",
        "return Snapshot(*map(gradients.copy, (counts, (counters.overflowed,), retries, scales, norms)))",
        "return Snapshot(counts, (counters.overflowed,), retries, scales, norms)",
        (_MONITOR,),
    ),
    Mutant(
        "a monitor takes every step after a skipped one for skipped",
        "callbacks/watched_step.py",
        "skipped, self._skipped_steps = skipped_steps - self._skipped_steps, skipped_steps",
        "skipped, self._skipped_steps = skipped_steps, skipped_steps",
        (_MONITOR,),
    ),
    Mutant(
        "a monitor warns of no floor",
        "callbacks/watched_step.py",
        "used <= loss_scale.min_loss_scale",
        "used < loss_scale.min_loss_scale",
        (_MONITOR, "test_own_loss_scales.py"),
    ),
    Mutant(
        "a monitor tells of every step of an endless series",
        "callbacks/watched_step.py",
        "if self._is_printed and not any(map(_is_milestone, new)):",
        "if not self._is_printed and not any(map(_is_milestone, new)):",
        ("test_loss_scale_monitor_windows.py",),
    ),
    Mutant(
        "a summary shows a norm where there was no verdict",
        "callbacks/watched_step.py",
        "        if self._has_decided:\n",
        "        if snapshot.norms:\n",
        ("test_summary.py",),
    ),
    Mutant(
        "a monitor reads a flushed window one epoch late",
        "callbacks/loss_scale_monitor.py",
        '        """Reads what a callback after this one has flushed at the end of the epoch before."""\n'
        "        self._read_flush()\n",
        '        """Reads what a callback after this one has flushed at the end of the epoch before."""\n',
        ("test_loss_scale_monitor_windows.py",),
    ),
    Mutant(
        "a monitor prints every step",
        "callbacks/loss_scale_monitor.py",
        "if step // self._every_n_steps > self._printed_step // self._every_n_steps:",
        "if step // self._every_n_steps >= self._printed_step // self._every_n_steps:",
        (_MONITOR, "test_model.py"),
    ),
    Mutant(
        "a monitor leaves out an epoch's last steps",
        "callbacks/loss_scale_monitor.py",
        "        self._read()\n        self._read_flush()\n",
        "        self._read_flush()\n",
        (_MONITOR, "test_model.py"),
    ),
    Mutant(
        "a full disk leaves a part of a row",
        "callbacks/files.py",
        'file.truncate(start + lines.rfind(b"\\n", 0, written) + 1)',
        "file.truncate(start + written)",
        ("test_full_disk.py",),
    ),
    Mutant(
        "a part of a row stays in a file that is continued",
        "callbacks/files.py",
        "            if whole < len(before):\n                file.truncate(whole)\n",
        "",
        ("test_full_disk.py",),
    ),
]
