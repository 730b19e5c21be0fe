"""Watching what goes through the cells of a network."""

import contextlib
from functools import partial
from typing import NamedTuple

from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._mindspore import around_transforms, register_forward_hook

_FLOATS = (mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16)


class Place(NamedTuple):
    """
    Where in a network a value was seen.

    - **cell** (str) - The cell's name in the user's network.
    - **call** (int) - Which of the cell's calls in one forward it was, from 0 on: a cell may be used several times.
    - **item** (int) - Which item of the tuple that the cell returns it was, counted through the tuples in it; 0 if it
      returns one tensor.
    """

    cell: str
    call: int
    item: int

    def __str__(self) -> str:
        call = f" (call {self.call + 1})" if self.call else ""
        return f"{self.cell}{call}" + (f" [{self.item}]" if self.item else "")


def cell_names(prefix, network):
    """From the id of each cell to its name in the network; the network itself goes by its class."""
    names = {}
    for name, cell in network.cells_and_names():
        path = ".".join(filter(None, (prefix, name)))
        names[id(cell)] = path or type(cell).__name__
    return names


def is_float(value):
    """Whether it is a Tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.dtype in _FLOATS


class WatchError(RuntimeError):
    """Watching failed, not what was watched."""


def as_array(tensor):
    """The values in NumPy, which has no bfloat16."""
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()


def _flat(output):
    """What is in a tensor or in tuples of them: an LSTM returns (output, (h, c))."""
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in _flat(item)]
    return [output]


class CellWatch:
    """
    Calls back for every value that a cell of a network in PyNative mode puts out and every gradient that flows back,
    innermost cells first.

    Args:
        prefix (str): Goes before the cells' names.
        network (Cell): The network.
        on_output (Callable): Called with a Place, the cell's inputs (a tuple), and the tensor that it puts out.
        on_gradient_in (Callable): Called with a Place and the gradient that flows into what the cell put out.
        on_gradient_out (Callable, optional): Called with a Place and the gradient that the cell's backward passes on
            to its inputs; `item` is the input's position. Default: ``None`` .
        on_weight (Callable, optional): Called with a weight when its gradient is computed. Default: ``None`` .
    """

    def __init__(self, prefix, network, on_output, on_gradient_in, on_gradient_out=None, on_weight=None):
        self._network = network
        self._names = cell_names(prefix, network)
        self._on_output = on_output
        self._on_gradient_in = on_gradient_in
        self._on_gradient_out = on_gradient_out
        self._on_weight = on_weight
        self._calls = {}

    @contextlib.contextmanager
    def watching(self):
        """A context for one forward and one backward."""
        self._calls.clear()
        self._failure = None
        # What registers each hook, and the handles that remove them.
        self._registrations, self._handles = list(self._of_network()), []
        self._register()
        try:
            # Compiled code would have the hooks compiled, too.
            with around_transforms(self._unwatched):
                yield
        finally:
            self._remove()
            self._registrations.clear()
            if self._failure is not None:
                raise WatchError(
                    f"watching the cells failed, through no fault of the network; please report it: {self._failure!r}"
                ) from self._failure

    @contextlib.contextmanager
    def _unwatched(self):
        self._remove()
        try:
            yield
        finally:
            self._register()

    def _register(self):
        self._handles += [register() for register in self._registrations]

    def _remove(self):
        while self._handles:
            self._handles.pop().remove()

    def _of_network(self):
        for _, cell in self._network.cells_and_names():
            if self._on_gradient_out is not None:
                yield partial(cell.register_backward_hook, self._hook(self._backward_hook))
            yield partial(register_forward_hook, cell, self._hook(self._forward_hook))
        if self._on_weight is not None:
            for weight in self._network.trainable_params():
                yield partial(weight.register_hook, self._hook(partial(self._weight_hook, weight)))

    def _hook(self, note):
        """A function, since MindSpore 2.7 takes nothing else that can be called, which keeps what `note` raises."""

        def hook(*args):
            try:
                note(*args)
            except Exception as error:
                self._failure = self._failure or error

        return hook

    def _forward_hook(self, cell, inputs, output):
        name = self._names[id(cell)]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        for item, tensor in enumerate(_flat(output)):
            if is_float(tensor):
                place = Place(name, call, item)
                self._on_output(place, inputs, tensor)
                register = partial(tensor.register_hook, self._hook(partial(self._gradient_hook, place)))
                # A constant gets no gradient, nor does what comes of frozen Parameters: MindSpore refuses.
                with contextlib.suppress(RuntimeError):
                    self._handles.append(register())
                    self._registrations.append(register)

    def _weight_hook(self, weight, _gradient):
        self._on_weight(weight)

    def _gradient_hook(self, place, gradient):
        # None of an output that nothing uses, such as the states of an LSTM.
        if gradient is not None:
            self._on_gradient_in(place, gradient)

    def _backward_hook(self, cell, grad_input, grad_output):
        name = self._names[id(cell)]
        # The backward goes through a cell's calls from the last one to the first.
        call = self._calls[name]
        self._calls[name] = call - 1
        for item, tensor in enumerate(grad_input):
            if is_float(tensor):
                self._on_gradient_out(Place(name, call, item), tensor)
