"""Watches the values in the cells of a network in PyNative mode, and in the lines of one cell."""

import contextlib
import linecache
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ms_lossscale._mindspore import around_transforms, raise_what_failed, register_forward_hook
from ms_lossscale._values import are_finite, is_float


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


class WatchError(RuntimeError):
    """The watching failed, not the network."""


def _flat(output):
    """Returns the tensors in an output, which may be nested tuples: an LSTM returns (output, (h, c))."""
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in _flat(item)]
    return [output]


class CellWatch:
    """
    Calls back for every output of the cells of a network in PyNative mode, and every gradient that flows back,
    innermost cells first.

    Args:
        part (TrainedPart): The network.
        on_output (Callable): Called with a Place, a tensor that the cell returns, and the cell's inputs (a tuple).
        on_gradient_in (Callable, optional): Called with a Place and the gradient that flows into the cell's output.
        on_gradient_out (Callable, optional): Called with a Place and the gradient that the cell's backward passes on
            to its inputs; `item` is the input's position.
        on_weight (Callable, optional): Called with a weight when its gradient is computed.
        on_call (Callable, optional): Called with a cell's name before its forward.
    """

    def __init__(self, part, on_output, on_gradient_in=None, on_gradient_out=None, on_weight=None, on_call=None):
        self._network = part.network
        self._names = part.cell_names()
        self._on_output = on_output
        self._on_gradient_in = on_gradient_in
        self._on_gradient_out = on_gradient_out
        self._on_weight = on_weight
        self._on_call = on_call
        self._calls = {}
        self._failure = None
        # The functions that register the hooks, and the handles that remove them.
        self._registrations, self._handles = list(self._of_network()), []

    @contextlib.contextmanager
    def watching(self):
        """A context for one forward and one backward."""
        self._register()
        try:
            # Compiled code would compile the hooks, too.
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
            if self._on_call is not None:
                yield partial(cell.register_forward_pre_hook, self._hook(self._pre_hook))
        if self._on_weight is not None:
            for weight in self._network.trainable_params():
                yield partial(weight.register_hook, self._hook(lambda _, weight=weight: self._on_weight(weight)))

    def _hook(self, note):
        """Returns a function, since MindSpore 2.7 accepts no other callable. It keeps exceptions that `note` raises."""

        def hook(*args):
            # This is a failure of the network, not of `note`.
            raise_what_failed()
            try:
                note(*args)
            except Exception as error:
                self._failure = self._failure or error

        return hook

    def _pre_hook(self, cell, _inputs):
        self._on_call(self._names[id(cell)])

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
                # MindSpore refuses for constants and for results of frozen Parameters, which get no gradient.
                with contextlib.suppress(RuntimeError):
                    self._handles.append(register())
                    self._registrations.append(register)

    def _gradient_hook(self, place, gradient):
        # It is None for an output that nothing uses, such as the states of an LSTM.
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
    Finds the first line of a cell's construct, not of what that calls, with a local variable or result that is not
    finite although all arguments were.
    """

    def __init__(self, cell):
        self._cell = cell
        self._found = None
        # In the present call: the line that began last, and the values that existed before it.
        self._line, self._known = None, {}

    def __str__(self) -> str:
        """Returns the file, number and text of the line; empty if none was found."""
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
            # At first the arguments, later what is known to be finite.
            new = [each for key, each in values.items() if key not in self._known]
            if self._line is not None and not are_finite(new):
                self._found = self._line
            # Kept alive, so that no other value gets their ids.
            self._known.update(values)
            self._line = frame.f_code.co_filename, frame.f_lineno
        return self._step
