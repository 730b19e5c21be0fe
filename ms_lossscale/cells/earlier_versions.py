"""Brings what earlier versions saved within an accumulation cycle up to date."""

import numpy as np
from mindspore import Tensor, ops

from ms_lossscale._memory_in_use import known_memory
from ms_lossscale._mindspore import write_in_place
from ms_lossscale._values import as_array
from ms_lossscale.step.scaling import CycleScaling

# 0.3 kept the length of a cycle times 2**16 in the count of its calls. If it was more than _MOST, the count plus 2**31
# is the number of calls.
_LENGTH, _MOST, _LONGER = 2**16, 2**15 - 1, 2**31


class EarlierCycles:
    """
    Converts the cycles in checkpoints of 0.1 to 0.3 for a training cell, and adds what these versions did not save:

    - How many calls a cycle takes, see above. 0.1 and 0.2 did not tell: as many as it takes now.
    - Whether the loss scale was set by hand within the cycle: the cycle's scale was negative then.
    - Copies of what the forward only reads: 0.1 and 0.2 made none. It is as it was at the beginning of the cycle.
    - Which state that the steps of several networks may write each of them wrote. 0.1 and 0.2 did not tell: all of it.
    - Why steps were skipped, and what cycles know of weights and overflows besides: 0.1 to 0.3 did not. It is 0.
    """

    def __init__(self, steps, counts, turns=None):
        self._steps, self._counts, self._turns = steps, counts, turns
        scalings = [its for step in steps for _, its in step.scaling.cells_and_names() if isinstance(its, CycleScaling)]
        self._scales = [(its.cycle_scale, its.is_set) for its in scalings]
        self._zeros = {step.update.step_counters.skipped_steps.name: _unknown_to_0_3(step) for step in steps}
        self._added = [count.length for count in self._counts] + [is_set for _, is_set in self._scales]
        for step in steps:
            self._added += [*step.forward_state.copies, *step.forward_state.wrote, *_unknown_to_0_3(step)]
        self._known = known_memory([count.value for count in self._counts] + [scale for scale, _ in self._scales])
        self._known_added = known_memory(self._added)
        self.remember()

    def remember(self):
        """Takes the present memory for what nothing has been loaded into."""
        self._known.remember()
        self._known_added.remember()

    def convert_loaded(self, own):
        """Converts what MindSpore's own functions have loaded into Parameters, which are `own`, a dict by name."""
        if self._known.has_changed():
            missing = {its.name for its in self._known_added.unchanged(self._added)}
            loaded = {name: value for name, value in own.items() if name not in missing}
            write_in_place([(own[name], value) for name, value in self.converted(loaded).items()])
            if self._turns is not None:
                self._turns.forget_losses()
            self.remember()

    def converted(self, parameters):
        """Returns what replaces entries of a checkpoint, a dict from names to Tensors, or is missing in it."""
        found = {}
        for known, unknown in self._zeros.items():
            if known in parameters and not any(its.name in parameters for its in unknown):
                found.update((its.name, ops.zeros_like(its)) for its in unknown)
        for count in self._counts:
            if count.value.name in parameters:
                found.update(_with_length(count, parameters))
        for scale, is_set in self._scales:
            if scale.name in parameters and is_set.name not in parameters:
                was_set = bool(as_array(parameters[scale.name]) < 0)
                found[is_set.name] = Tensor(was_set)
                if was_set:
                    found[scale.name] = -parameters[scale.name]
        for step in self._steps:
            if step.cycle_state is not None and step.cycle_state.count.value.name in parameters:
                found.update(_missing_of(step.forward_state, parameters))
        if self._turns is not None:
            found.update(self._last_losses(parameters))
        return found

    def _last_losses(self, parameters):
        """Within a cycle, 0.1 and 0.2 saved for networks whose turn it is a loss that may still be skipped."""
        turns = self._turns
        count, length = saved_count(turns.calls.value.name, turns.calls.length.name, parameters)
        if length or not 0 < count < _LENGTH:
            return {}
        cycles, every, losses = (
            as_array(parameters.get(its.name, its)) for its in (turns.cycles, turns.cycle_every, turns.last_losses)
        )
        return {turns.last_losses.name: Tensor(np.where((cycles + 1) % every == 0, np.float32(0), losses))}


def saved_count(name, length, parameters):
    """Returns the ints that were saved as the count of a cycle and, under the name `length`, as its length, or 0."""
    return tuple(int(as_array(parameters[each])) if each in parameters else 0 for each in (name, length))


def _with_length(count, parameters):
    """Returns the count of calls and the length of its cycle. What can't be a count stays, and so is refused."""
    calls, length = saved_count(count.value.name, count.length.name, parameters)
    if count.length.name in parameters and (length or not calls):
        return {}
    calls, length = count_and_length(calls, count.steps)
    return {its.name: Tensor(np.int32(number)) for its, number in ((count.value, calls), (count.length, length))}


def count_and_length(saved, steps):
    """
    Returns the number of calls and the length of a cycle, given the count that a version without lengths saved, and the
    length in this cell. A count that is none of such a cycle remains, with a length of 0.
    """
    length, calls = divmod(saved, _LENGTH)
    length = length or steps
    if saved < 0:
        length, calls = steps if steps > _MOST else 0, saved + _LONGER
    return (calls, length) if 0 < calls < length else (saved, 0)


def other_steps(saved, length, steps):
    """
    Returns how many calls the cycle takes, a str, if it has begun and they are not `steps`, and else None. Given are
    the count and the length that were saved.
    """
    if not length:
        length = count_and_length(saved, steps)[1]
    if length:
        return None if length == steps or saved == 0 else str(length)
    # Nobody has cycles of 2**30 calls, so that a small negative number is none of theirs.
    if saved < 0:
        return f"more than {_MOST}" if steps <= _MOST and saved + _LONGER < 2**30 else None
    return "more than 1" if steps == 1 and saved > 0 else None


def _unknown_to_0_3(step):
    """Returns the state of a step that 0.1 to 0.3 did not save."""
    unknown = [step.update.step_counters.skip_reasons]
    if step.cycle_state is not None:
        unknown += [*step.cycle_state.weights, step.cycle_state.is_weighted, *step.cause.flags]
    return unknown


def _missing_of(forward_state, parameters):
    """Returns the copies of forward state, and the flags of what was written, that are missing."""
    pairs = zip(forward_state.copies, forward_state.written)
    missing = {copy.name: parameters.get(its.name, its) for copy, its in pairs}
    missing.update((wrote.name, ops.ones_like(wrote)) for wrote in forward_state.wrote)
    return {name: value for name, value in missing.items() if name not in parameters}
