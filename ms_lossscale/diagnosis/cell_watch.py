"""Watching what goes through the cells of a network in PyNative mode, and through the lines of one cell."""

import contextlib
import linecache
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._mindspore import around_transforms, raise_what_failed, register_forward_hook

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


def is_float(value):
    """Whether it is a Tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.dtype in _FLOATS


class WatchError(RuntimeError):
    """Watching failed, not what was watched."""


def as_array(tensor):
    """The values in NumPy, which has no bfloat16."""
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()


def are_finite(tensors):
    """Whether all values of all of them are."""
    return all(np.isfinite(as_array(each)).all() for each in tensors)


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
        part (TrainedPart): The network.
        on_output (Callable): Called with a Place, the tensor that the cell puts out, and the cell's inputs (a tuple).
        on_gradient_in (Callable, optional): Called with a Place and the gradient that flows into what the cell put out.
        on_gradient_out (Callable, optional): Called with a Place and the gradient that the cell's backward passes on
            to its inputs; `item` is the input's position.
        on_weight (Callable, optional): Called with a weight when its gradient is computed.
    """

    def __init__(self, part, on_output, on_gradient_in=None, on_gradient_out=None, on_weight=None):
        self._network = part.network
        self._names = part.cell_names()
        self._on_output = on_output
        self._on_gradient_in = on_gradient_in
        self._on_gradient_out = on_gradient_out
        self._on_weight = on_weight
        self._calls = {}
        self._failure = None
        # What registers each hook, and the handles that remove them.
        self._registrations, self._handles = list(self._of_network()), []

    @contextlib.contextmanager
    def watching(self):
        """A context for one forward and one backward."""
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
                yield partial(weight.register_hook, self._hook(lambda _, weight=weight: self._on_weight(weight)))

    def _hook(self, note):
        """A function, since MindSpore 2.7 takes nothing else that can be called, which keeps what `note` raises."""

        def hook(*args):
            # The network's failure, not that of `note`.
            raise_what_failed()
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
                self._on_output(place, tensor, inputs)
                if self._on_gradient_in is None:
                    continue
                register = partial(tensor.register_hook, self._hook(partial(self._gradient_hook, place)))
                # A constant gets no gradient, nor does what comes of frozen Parameters: MindSpore refuses.
                with contextlib.suppress(RuntimeError):
                    self._handles.append(register())
                    self._registrations.append(register)

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


class LineWatch:
    """
    Looks, line by line, for the first local variable or result of a cell's construct, not of what that calls, that is
    not finite, though no argument was.
    """

    def __init__(self, cell):
        self._cell = cell
        self._found = None
        # Of the call that runs: the line that was begun last, and the values that it does not make.
        self._line, self._known = None, {}

    def __str__(self) -> str:
        """The file, the number and the text of the line; nothing if none was found."""
        if self._found is None:
            return ""
        file, number = self._found
        return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"

    @contextlib.contextmanager
    def watching(self):
        """A context for one forward."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, _):
        if frame.f_code.co_name != "construct" or frame.f_locals.get("self") is not self._cell:
            return None
        self._line, self._known = None, {}
        return self._step

    def _step(self, frame, event, result):
        if self._found is None and event in ("line", "return"):
            values = {id(each): each for each in (*frame.f_locals.values(), result) if is_float(each)}
            # The arguments, at first, and what is known to be finite.
            new = [each for key, each in values.items() if key not in self._known]
            if self._line is not None and not are_finite(new):
                self._found = self._line
            # Kept, so that an id goes to no other value.
            self._known.update(values)
            self._line = frame.f_code.co_filename, frame.f_lineno
        return self._step
