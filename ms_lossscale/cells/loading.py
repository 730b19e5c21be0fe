"""Loads checkpoints into a training cell."""

from ms_lossscale._arguments import check_bool, check_tensors_by_name, listed
from ms_lossscale._mindspore import write_in_place
from ms_lossscale._values import as_array
from ms_lossscale.cells.earlier_versions import other_steps, saved_count
from ms_lossscale.step.clipping import with_norms_unscaled

# The end of the names, also for a cell with cycles where this one has none.
_COUNT, _LENGTH = "accumulation.micro_steps", "accumulation.steps"
_SHOWN = 5


def load(cell, parameters, strict):
    """Loads a checkpoint into a training cell in place, see :meth:`TrainingState.load_state_dict`."""
    cell._refuse_on_averages("'load_state_dict()'")
    owner, own, guard = type(cell).__name__, cell.parameters_dict(), cell._guard
    _check_arguments(f"{owner}.load_state_dict", parameters, strict)
    parameters = {**guard.loaded_parts.of(own, parameters), **_diagnoses_of_others(cell, parameters)}
    _check_shapes(owner, own, parameters)
    guard.earlier_cycles.convert_loaded(own)
    parameters = with_norms_unscaled(parameters)
    parameters = {**parameters, **guard.earlier_cycles.converted(parameters)}
    guard.begun_cycles.check_before_loading(own, parameters)
    guard.possible_values.check_before_loading(parameters)
    missing = [name for name in own if name not in parameters]
    unexpected = [name for name in parameters if name not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"For '{owner}.load_state_dict', 'parameters' must hold what the cell has, but {_listed(missing)} "
            f"missing and {_listed(unexpected)} unexpected. Construct the cell with the same arguments as the one "
            f"that was saved, or pass strict=False to load what fits. Nothing was loaded."
        )
    write_in_place([(parameter, parameters[name]) for name, parameter in own.items() if name in parameters])
    cell._after_loading()
    return missing, unexpected


def _diagnoses_of_others(cell, parameters):
    """Returns this cell's diagnoses, to be kept, in place of those that checkpoints have of other weights."""
    own = [step.update.step_counters.overflowed for step in cell.steps]
    return {its.name: its for its in own if its.name in parameters and parameters[its.name].shape != its.shape}


class BegunCycles:
    """
    Refuses to continue a cycle that was begun with another `gradient_accumulation_steps`, since the next update would
    be wrong by the ratio of the two, or with weights where the cell has none. It takes the number of calls in a cycle,
    the counts of the cell's cycles, and their states.
    """

    def __init__(self, owner, steps, counts, cycle_states):
        self._owner, self._steps, self._counts, self._cycle_states = owner, steps, counts, cycle_states

    def check(self):
        """Checks the counts after MindSpore's own functions may have loaded something."""
        for count in self._counts:
            both = {its.name: its for its in count.get_parameters()}
            self._check(count.value.name, count.length.name, both, "what was loaded")
        for state in self._cycle_states:
            both = {its.name: its for its in (state.is_weighted, state.count.value)}
            self._check_weights(state, both, "what was loaded")

    def check_before_loading(self, own, parameters):
        """Checks `parameters` before they are written into those of `own` with the same names."""
        lengths = {count.value.name: count.length.name for count in self._counts}
        for name, value in parameters.items():
            if name in lengths or (name not in own and name.endswith(_COUNT) and value.shape == ()):
                length = lengths.get(name, f"{name[: -len(_COUNT)]}{_LENGTH}")
                self._check(name, length, parameters, "'parameters'", " Nothing was loaded.")
        for state in self._cycle_states:
            self._check_weights(state, parameters, "'parameters'", " Nothing was loaded.")

    def _check_weights(self, state, parameters, what, end=""):
        names = state.count.value.name, state.is_weighted.name
        if not all(name in parameters for name in names) or not as_array(parameters[names[0]]) > 0:
            return
        was = bool(as_array(parameters[names[1]]))
        if state.must_be_weighted not in (None, was):
            raise ValueError(
                f"For '{self._owner}', the argument 'weighted' must be {was}, but got {not was}: {what} was saved "
                f"within an accumulation cycle that was begun so. Go on with it to the end of the cycle, or to a "
                f"flush(), and save then.{end}"
            )

    def _check(self, name, length, parameters, what, end=""):
        count, length = saved_count(name, length, parameters)
        its_steps = other_steps(count, length, self._steps)
        if its_steps is not None:
            raise ValueError(
                f"For '{self._owner}', the argument 'gradient_accumulation_steps' must be {its_steps}, but got "
                f"{self._steps}: {what} was saved within an accumulation cycle that was begun with {its_steps} "
                f"({name!r} is {count}), and holds gradients divided by that. Go on with it to the end of the "
                f"cycle, or to a flush(), and save then: between two cycles a checkpoint loads with any number.{end}"
            )


def _check_arguments(owner, parameters, strict):
    """Raises unless `load_state_dict` gets Parameters or Tensors, by their names."""
    what = f"For '{owner}', the argument 'parameters' must be a dict from names to Parameters or Tensors"
    check_tensors_by_name(what, parameters)
    check_bool(owner, "strict", strict)


def _check_shapes(owner, own, parameters):
    for name, value in parameters.items():
        if name in own and tuple(value.shape) != tuple(own[name].shape):
            raise ValueError(
                f"For '{owner}.load_state_dict', {name!r} must have the shape {tuple(own[name].shape)}, but got "
                f"{tuple(value.shape)}. Nothing was loaded."
            )


def _listed(names):
    if not names:
        return "none is"
    return f"{listed(names, _SHOWN)} {'is' if len(names) == 1 else 'are'}"
