"""Looks, in the first calls, for what moves although no skipped step restores it, or although it is frozen."""

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import listed
from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale._output import warn_user
from ms_lossscale.step.manual import ManualCalls

# The host waits for the values that it looks at, so that it looks in so many calls only.
_CALLS = 3
_SHOWN = 3


class FirstSteps:
    """Looks at the first calls of a training cell, or of a ManualStep, and warns."""

    def __init__(self, owner, steps):
        self._owner = owner
        transactions = [step.transaction for step in steps if step.transaction.may_skip]
        restored = {id(written) for step in transactions for written in step.forward_state.written}
        self._weights = [_Weights(step.counters, step.update.optimizers.parameters, restored) for step in transactions]
        self._untrained = _Watched(_in_no_optimizer(steps, restored) if transactions else [])
        self._calls = 0
        self._has_begun = False

    def before(self):
        """Remembers values before a call."""
        self._has_begun = True
        self._untrained.remember()
        for weights in self._weights:
            weights.remember()

    def after(self):
        """Looks after a call. Returns whether it goes on."""
        if not self._has_begun:  # Compiled code began the call.
            return True
        self._has_begun = False
        self._calls += 1
        names = self._untrained.moved()
        if names:
            self._warn(
                f"the forward wrote {names}, which a skipped step does not restore, since a Parameter that is not "
                f"frozen is not copied, nor a frozen one that is large or a weight of MindSpore's layers. Pass them as "
                f"forward_state=[...]."
            )
            self._untrained = _Watched([])
        for weights in self._weights:
            self._look_at(weights)
        return self._calls < _CALLS and self._is_watching()

    def _is_watching(self):
        return bool(self._untrained.parameters) or any(weights.are_watched() for weights in self._weights)

    def _look_at(self, weights):
        if weights.were_updated():
            self._look_at_frozen(weights)
        else:
            self._look_at_not_restored(weights)

    def _look_at_frozen(self, weights):
        names = weights.frozen.moved()
        if names:
            self._warn(
                f"an optimizer moved {names}, frozen after it was constructed: it goes on with what its parameters "
                f"were then. Set requires_grad first, and construct it from network.trainable_params()."
            )
        weights.has_shown_frozen = True

    def _look_at_not_restored(self, weights):
        names = weights.not_restored.moved()
        if names:
            self._warn(
                f"the forward wrote {names}, which an optimizer trains, too, so that a skipped step does not restore "
                f"them. Pass them as forward_state=[...]; or, if no gradient is to move them, construct them with "
                f"requires_grad=False, and the optimizer without them."
            )
        weights.not_restored = _Watched([])

    def _warn(self, what):
        warn_user(f"For '{self._owner}', {what}")


def _in_no_optimizer(steps, restored):
    """
    Returns the Parameters of the networks that no step of the cell moves by itself. Of a ManualStep, these are only the
    frozen ones: other optimizers may act between its beginning and its end.
    """
    cells = [cell for step in steps for _, cell in step.networks_run.cells_and_names()]
    # A loss scale moves in any step, and what comes after the update in those that are applied.
    updates = [step.transaction.update for step in steps]
    moving = [update.after_update for update in updates if update.after_update is not None]
    moving += [cell for cell in cells if isinstance(cell, FixedAttributes)]
    left_out = {*restored, *(id(parameter) for cell in moving for parameter in cell.get_parameters())}
    left_out.update(id(weight) for update in updates for weight in update.optimizers.parameters)
    parameters = {id(parameter): parameter for cell in cells for parameter in cell.get_parameters(expand=False)}
    is_manual = any(isinstance(step, ManualCalls) for step in steps)
    return [
        parameter
        for key, parameter in parameters.items()
        if key not in left_out and not (is_manual and parameter.requires_grad)
    ]


class _Weights:
    """The weights of a step: those that a skipped step does not restore, and those that are frozen."""

    def __init__(self, counters, weights, restored):
        self._weights = weights
        self._counters = counters
        self._applied_steps = 0
        self.frozen = _Watched([])
        self.not_restored = _Watched([weight for weight in weights if id(weight) not in restored])
        self.has_shown_frozen = False

    def remember(self):
        self._applied_steps = self._count()
        self.not_restored.remember()
        frozen = [] if self.has_shown_frozen else [weight for weight in self._weights if not weight.requires_grad]
        self.frozen = _Watched(frozen)
        self.frozen.remember()

    def are_watched(self):
        """Returns whether there is still something to look at."""
        return bool(self.not_restored.parameters or self.frozen.parameters)

    def were_updated(self):
        """Returns whether the optimizers have made a step since."""
        return self._count() > self._applied_steps

    def _count(self):
        return int(self._counters.applied_steps.asnumpy())


class _Watched:
    """Parameters, and sums of the values that they had."""

    def __init__(self, parameters):
        self.parameters = parameters
        self._sums = []

    def remember(self):
        self._sums = [_sums(parameter) for parameter in self.parameters]

    def moved(self):
        """Returns the names of those that have other values now, as a list in words."""
        names = []
        for parameter, sums in zip(self.parameters, self._sums):
            if not np.array_equal(sums.asnumpy(), _sums(parameter).asnumpy(), equal_nan=True):
                names.append(parameter.name)
        return listed(names, _SHOWN)


def _sums(tensor):
    # Not of all elements, in which the change of a single one would be lost.
    values = tensor.astype(mstype.float32)
    return (values if values.ndim else values.reshape((1,))).sum(0)
