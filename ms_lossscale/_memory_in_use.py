"""Keeps Parameters in the memory that compiled code knows, and notices other Parameters and other memory."""

import itertools

from mindspore import ParameterTuple, Tensor, nn, ops

from ms_lossscale._mindspore import write_in_place


class MemoryInUse:
    """
    Moves Parameters back into the memory that they had in the first step, with the values that they have now. A buffer
    gets back the memory that it shares with a Parameter.

    `mindspore.load_param_into_net`, `Parameter.set_data` and what builds on them give a Parameter other memory. In
    PyNative mode, so does `self.parameter = value` within a forward. Code that `mindspore.jit` compiled goes on using
    the memory that it knew.
    """

    def __init__(self, parameters, buffers=()):
        self.hold(parameters, buffers)

    def hold(self, parameters, buffers):
        """Keeps these from now on, in the memory that they have in the next step."""
        self._parameters = parameters
        self._buffers = buffers
        self._aliases = None
        self._addresses = None
        self._has_run = False

    def put_back(self):
        """Moves Parameters back before a step. It costs 0.2 us for each Parameter."""
        if self._aliases is None:
            self._remember()
        moved = self._moved_back(lambda tensor: Tensor(tensor.asnumpy()))
        if moved:
            write_in_place(moved)

    def put_back_within_a_step(self):
        """Moves Parameters back after a forward, without waiting for the device."""
        for tensor, value in self._moved_back(ops.deepcopy):
            ops.assign(tensor, value)

    def settle(self, was_skipped):
        """
        Moves Parameters back after a step. In graph mode, `setattr(self, name, value)` within a forward changes the
        memory, too, and compiled code does not put it back. `was_skipped` is called only if memory has changed.
        """
        moved = self._moved_back(ops.deepcopy)
        if moved and not was_skipped():
            write_in_place(moved)
        self.accept()

    def accept(self):
        """Accepts, after the first step, the memory that the backward of MindSpore 2.7 gives some in PyNative mode."""
        if not self._has_run:
            self._has_run = True
            self._addresses = list(map(Tensor.data_ptr, self._tensors()))

    def _moved_back(self, copy):
        """Moves tensors back. Returns pairs of such a tensor and a copy of what is to be written into it."""
        tensors = self._tensors()
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses == self._addresses:
            return []
        moved = [i for i, address in enumerate(addresses) if address != self._addresses[i]]
        values = [(tensors[i], copy(tensors[i])) for i in moved]
        for i in moved:
            tensors[i].assign_value(self._aliases[i])
        return values

    def _tensors(self):
        return [*self._parameters, *(buffer.registered() for buffer in self._buffers)]

    def _remember(self):
        # MindSpore 2.7 gives a tensor memory when it is first used.
        write_in_place([(tensor, tensor) for tensor in self._tensors()])
        for buffer in self._buffers:
            buffer.share()
        # Other tensors keep the same memory alive; `parameter.value()` would be a copy.
        self._aliases = list(map(Tensor, self._tensors()))
        self._addresses = list(map(Tensor.data_ptr, self._tensors()))


class Known:
    """
    Tells, before each step and at little cost, whether objects are still those that were there before.

    Args:
        identities (Callable): Returns a list of numbers, which are others for other objects.
        kept (Callable): Returns what must be kept alive so that nothing else gets these numbers.
    """

    def __init__(self, identities, kept):
        self._identities, self._kept = identities, kept
        self._known = None

    def has_changed(self):
        return self._known is None or self._known != self._identities()

    def unchanged(self, objects):
        """Returns those of these objects whose numbers are as before; the objects are as many."""
        return [each for each, known, now in zip(objects, self._known, self._identities()) if known == now]

    def remember(self):
        self._alive = self._kept()
        self._known = self._identities()


def known_memory(parameters):
    """
    Tells whether MindSpore's own functions may have loaded something into Parameters, which gives them other memory.
    Only then the host reads what it was. It costs 0.2 us for each Parameter.
    """

    def aliases():
        # MindSpore 2.7 gives a tensor its memory when it is first used.
        write_in_place([(parameter, parameter) for parameter in parameters])
        return list(map(Tensor, parameters))

    return Known(lambda: list(map(Tensor.data_ptr, parameters)), aliases)


def known_parts(cells):
    """Tells whether cells have registered other Parameters or cells, or further buffers. It costs 0.3 us for each."""
    dicts = [its for cell in cells for its in (cell._params, cell._cells)]
    buffers = [cell._buffers for cell in cells]

    def parts():
        return itertools.chain.from_iterable(map(dict.values, dicts))

    return Known(lambda: [*map(id, parts()), *map(len, buffers)], lambda: list(parts()))


class UseInOutermostGraph(nn.Cell):
    """
    Makes the graph that it is part of use Parameters, at no cost. If only a branch uses them, MindSpore goes on using
    the memory that they had when it compiled, even after `mindspore.load_param_into_net`, say, has replaced it.

    Args:
        parameters (list[Parameter]): All that the graph and its branches use.

    Inputs:
        - **inputs** (tuple) - What everything else is computed from.

    Outputs:
        tuple, the same.
    """

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        # A tuple, since MindSpore optimizes a dependence on a single Parameter away.
        self.parameters = ParameterTuple(parameters)

    def construct(self, inputs):
        return ops.depend(inputs, self.parameters)
