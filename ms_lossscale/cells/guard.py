"""Looks after the state of a training cell around its steps: what was loaded, has appeared, or got other memory."""

import contextlib

from mindspore import PYNATIVE_MODE, get_context

from ms_lossscale._memory_in_use import MemoryInUse, known_memory
from ms_lossscale._mindspore import explanation, forget_failed_calls
from ms_lossscale.cells.loading import BegunCycles
from ms_lossscale.cells.possible_values import PossibleValues
from ms_lossscale.forward_state.appearing import WALKS
from ms_lossscale.sharding.load_parts import LoadedParts


class Guard:
    """
    Between two steps, a user's program and MindSpore's own functions may load values into Parameters, give them other
    memory, or make new ones. What was loaded is checked, compiled code finds its Parameters where they were, and a
    skipped step restores what has appeared.
    """

    def __init__(self, cell, optimizers, steps_in_cycle):
        owner = type(cell).__name__
        self.earlier_cycles = cell._earlier_cycles()
        self.loaded_parts = LoadedParts(owner, optimizers)
        cycle_states = [step.cycle_state for step in cell.steps if step.cycle_state is not None]
        self.begun_cycles = BegunCycles(owner, steps_in_cycle, cell._cycle_counts(), cycle_states)
        self.possible_values = PossibleValues(cell)
        self._known_memory = known_memory([*self.possible_values.parameters(), *self.loaded_parts.layouts])
        forward_states = [step.forward_state for step in cell.steps]
        self._appearing = [its.appearing for its in forward_states if its.appearing is not None]
        self._written = [its.memory for its in forward_states]
        written = {id(parameter) for its in forward_states for parameter in its.written}
        others = [parameter for parameter in cell.get_parameters() if id(parameter) not in written]
        # Graph mode itself notices if Parameters get other memory between steps.
        self._others = MemoryInUse(others if get_context("mode") == PYNATIVE_MODE else ())

    def before(self, parameters_dict):
        """
        Looks, before a step, for what has appeared or may have been loaded since the last one. `parameters_dict` is
        the method of the training cell.
        """
        for appearing in self._appearing:
            if next(appearing.calls) in WALKS or appearing.parts.has_changed():
                appearing.look()
        was_loaded = self._known_memory.has_changed()
        if was_loaded:
            self._check_loaded(parameters_dict())
        self.put_back()
        if was_loaded:
            self._known_memory.remember()
            self.earlier_cycles.remember()

    def _check_loaded(self, own):
        self.earlier_cycles.convert_loaded(own)
        self.loaded_parts.check()
        self.begun_cycles.check()
        self.possible_values.check()

    def put_back(self):
        """Moves Parameters back into the memory that compiled code knows."""
        self._others.put_back()
        for memory in self._written:
            memory.put_back()

    def after(self, was_skipped):
        """Does the same after a step. `was_skipped(i)`, whether step `i` was, is called only if memory has changed."""
        self._others.accept()
        for i, memory in enumerate(self._written):
            memory.settle(lambda i=i: was_skipped(i))


@contextlib.contextmanager
def explaining_errors(cell):
    """A context that clears what a failed call of a training cell leaves, and explains its error where it can."""
    try:
        yield
    except BaseException as error:
        forget_failed_calls()
        message = explanation(cell, error) if isinstance(error, (RuntimeError, TypeError)) else None
        if message is None:
            raise
        raise RuntimeError(message) from error
