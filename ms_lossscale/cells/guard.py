"""What happens in Python around a step: what was loaded is checked, and what compiled code knows stays in place."""

import contextlib

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import listed
from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale._memory_in_use import KnownMemory, MemoryInUse
from ms_lossscale._mindspore import explanation, forget_failed_calls
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.cells.loading import LoadedState
from ms_lossscale.cells.warnings import Warnings

# Warnings look at what the device must have computed, so there is one look in so many calls; the first comes earlier.
_FIRST_LOOK, _CALLS_PER_LOOK = 50, 500
# In so many steps, it is looked at what the forward writes that is not restored.
_FIRST_STEPS = 3


class Guard:
    """
    Between two steps, a user's program and MindSpore's own functions may load values into Parameters, or give them
    other memory. What was loaded is checked, and compiled code finds its Parameters where they were.
    """

    def __init__(self, cell, optimizers):
        self._owner, self._optimizers = type(cell).__name__, [(its, len(its.parameters)) for its in optimizers]
        self.loaded = LoadedState(cell, optimizers)
        self._known_memory = KnownMemory(self.loaded.watched)
        self._rest = KnownMemory(self.loaded.rest)
        self._remember()
        forward_states = [step.transaction.forward_state for step in cell.steps]
        written = {id(parameter) for its in forward_states for parameter in its.written}
        frozen = frozen_and_not_restored([step for step in cell.steps if step.transaction.may_skip], written)
        self._first_steps = FirstSteps(self._owner, frozen) if frozen else None
        self.warnings, self._calls = Warnings(self._owner, cell.steps), 0
        # What steps write is put back after them, too.
        self._written = [its.memory for its in forward_states]
        self._others = MemoryInUse([each for each in cell.get_parameters() if id(each) not in written])

    def before(self, cell):
        """Looks, before a step of the training cell, for what may have been loaded since the last one."""
        for optimizer, count in self._optimizers:
            if len(optimizer.parameters) != count:
                raise RuntimeError(
                    f"For '{self._owner}', the {type(optimizer).__name__} has {len(optimizer.parameters)} parameters, "
                    f"but had {count} when the cell was constructed, and would not train the others. Construct a new "
                    f"cell."
                )
        if self._first_steps is not None:
            self._first_steps.before()
        was_loaded = self._known_memory.has_changed()
        if was_loaded:
            self.loaded.check(cell.parameters_dict(), self._known_memory.changed(), self._rest.changed())
        self.put_back()
        if was_loaded:
            cell._after_loading()
            self._remember()

    def _remember(self):
        self._known_memory.remember()
        self._rest.remember()

    def put_back(self):
        """Moves Parameters back into the memory that compiled code knows."""
        self._others.put_back()
        for memory in self._written:
            memory.put_back()

    def after(self, was_skipped):
        """Does the same after a step. `was_skipped(i)`, whether step `i` was, is called only if memory has changed."""
        self._others.accept()
        if self._first_steps is not None and not self._first_steps.after():
            self._first_steps = None
        for i, memory in enumerate(self._written):
            memory.settle(lambda i=i: was_skipped(i))
        self._calls += 1
        if self._calls == 1:  # The first step gives some Parameters their memory.
            self._remember()
            self.warnings.begin()
        if self._calls == _FIRST_LOOK or self._calls % _CALLS_PER_LOOK == 0:
            self.warnings.look()


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


def frozen_and_not_restored(steps, restored):
    """Returns the frozen Parameters of steps, except those whose ids are `restored`, and what skipped steps change."""
    cells = [cell for step in steps for _, cell in step.forwards_and_backwards.cells_and_names()]
    # A loss scale moves in any step, and what comes after the update in those that are applied.
    after = [its for step in steps if (its := step.transaction.after_update) is not None]
    after += [its for its in cells if isinstance(its, FixedAttributes)]
    others = {*restored, *(id(each) for cell in after for each in cell.get_parameters())}
    parameters = {id(its): its for cell in cells for its in cell.get_parameters(expand=False)}
    return [its for key, its in parameters.items() if not its.requires_grad and key not in others]


class FirstSteps:
    """Warns of these Parameters if the first steps write them."""

    def __init__(self, owner, frozen):
        self._owner, self._frozen, self._left, self._sums = owner, frozen, _FIRST_STEPS, None

    def before(self):
        self._sums = list(map(_sums, self._frozen))

    def after(self):
        """Looks after a step. Returns whether it goes on."""
        if self._sums is None:  # Compiled code began the step.
            return True
        pairs, self._sums, self._left = list(zip(self._frozen, self._sums)), None, self._left - 1
        wrote = [its.name for its, sums in pairs if not np.array_equal(sums, _sums(its), equal_nan=True)]
        if wrote:
            warn_user(
                f"For '{self._owner}', the forward wrote {listed(wrote, 3)}, which a skipped step does not restore, "
                f"since what is frozen is not copied if it is large, or a weight of MindSpore's layers. Pass "
                f"them as forward_state=[...]."
            )
        return self._left > 0 and not wrote


def _sums(tensor):
    # Not of all elements, in which the change of a single one would be lost.
    values = tensor.astype(mstype.float32)
    return (values.sum(0) if values.ndim else values).asnumpy()
