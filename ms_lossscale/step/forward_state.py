"""What a training forward writes besides its result, and how a skipped step takes it back."""

from mindspore import Parameter, ParameterTuple, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale.step.found_forward_state import find_forward_state
from ms_lossscale.step.only_if import only_if


class NoForwardState(nn.Cell):
    """The forward writes nothing, or nothing is ever undone. The methods are those of :class:`ForwardState`."""

    written = shared_buffers = ()

    def __init__(self):
        super().__init__(auto_prefix=False)

    def save(self, inputs):
        return inputs, ()

    def overflowed(self, saved):
        return ()

    def take_back(self, saved):
        pass

    def restore(self, saved):
        pass


class ForwardState(nn.Cell):
    """
    What a training forward writes, where each call is a step.

    Args:
        parameters (list[Parameter]): What it writes of them.
        buffers (list[SharedBuffer]): And of registered buffers.
    """

    def __init__(self, parameters, buffers):
        super().__init__(auto_prefix=False)
        _set_written(self, parameters, buffers)

    def save(self, inputs):
        """Copies the state before the forward, which `inputs` are tied to. Returns the inputs and the copies."""
        saved = gradients.copy(self.written)
        return ops.depend(inputs, saved), saved

    def overflowed(self, saved):
        """Whether the forward left something not finite that was finite: a tuple of one bool tensor, or empty."""
        return (_became_not_finite(saved, self.written),)

    def take_back(self, saved):
        """Undoes the call."""
        gradients.assign(self.written, saved)

    def restore(self, saved):
        """Undoes the step."""
        self.take_back(saved)


class WindowForwardState(nn.Cell):
    """
    The same where the calls of a window are one step: the first call copies, and the copies outlast the call, also if
    training is stopped and resumed in between. The methods are those of :class:`ForwardState`.

    Args:
        parameters, buffers: As for :class:`ForwardState`.
        state (WindowState): Tells which call is the first.
        prefix (str): For the names of the copies.
        takes_back_calls (bool): Whether a call is undone by itself, too.
    """

    def __init__(self, parameters, buffers, state, prefix, takes_back_calls):
        super().__init__(auto_prefix=False)
        _set_written(self, parameters, buffers)
        self.state = state
        self._takes_back_calls = takes_back_calls
        self.copies = ParameterTuple(
            Parameter(ops.deepcopy(parameter), name=f"{prefix}forward_state.{parameter.name}", requires_grad=False)
            for parameter in self.written
        )

    def save(self, inputs):
        inputs = ops.depend(inputs, only_if(self.state.is_first(), gradients.assign, self.copies, self.written))
        if not self._takes_back_calls:
            return inputs, ()
        saved = gradients.copy(self.written)
        return ops.depend(inputs, saved), saved

    def overflowed(self, saved):
        return (_became_not_finite(self.copies, self.written),)

    def take_back(self, saved):
        gradients.assign(self.written, saved)

    def restore(self, saved):
        gradients.assign(self.written, self.copies)


def _set_written(cell, parameters, buffers):
    cell.parameters = ParameterTuple(parameters)
    cell.shared_buffers = buffers
    # Unregistered: what stands for a buffer is in no checkpoint, since loading would part it from the buffer.
    written = ParameterTuple([*parameters, *(buffer.parameter for buffer in buffers)])
    object.__setattr__(cell, "written", written)


def _became_not_finite(before, after):
    became = ops.logical_not(gradients.finite(after))
    # Only then it matters what was not finite already: the bounds that an observer begins with, say.
    if became:
        became = gradients.became_not_finite(before, after)
    return became


def make_forward_state(owner, networks, settings, undoes, window_state, prefix):
    """
    What a step undoes.

    Args:
        owner (str): The training cell's name, for a warning.
        networks (tuple[Cell]): The networks, whose forward is searched for what it writes.
        settings (Settings): Names further Parameters.
        undoes (bool): Whether a step is ever undone.
        window_state (WindowState): None where each call is a step.
        prefix (str): For the names of the copies.
    """
    if not undoes:
        return NoForwardState()
    parameters, buffers = find_forward_state(owner, networks, settings.forward_state)
    if not parameters and not buffers:
        return NoForwardState()
    if window_state is None:
        return ForwardState(parameters, buffers)
    return WindowForwardState(parameters, buffers, window_state, prefix, takes_back_calls=settings.max_retries > 0)
