"""Finds the first overflow of a batch."""

import functools
import math
from typing import NamedTuple, Optional

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import Batch, check_scale
from ms_lossscale._output import written_scale
from ms_lossscale._values import are_finite, as_array, is_float, on_not_finite
from ms_lossscale.diagnosis.arguments import as_inputs, not_finite_weights_of, trained_parts
from ms_lossscale.diagnosis.cell_watch import Place, watching
from ms_lossscale.diagnosis.distribution import FLOAT16
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.function_network import Network
from ms_lossscale.overflow_detector import FloatStatusRegister, default_overflow_detector

_IN_REGISTER = (
    "But the NPU's status register is up: a value within an operator overflows, or an operator raises the register "
    "itself, as on some devices the gradient of a pooling does. Try cells in float32, or another operator there."
)
_CAME_IN = "It came in not finite already: it was computed between cells, in the construct of the one around them."


class Range(NamedTuple):
    """
    A summary of the values of a tensor.

    - **dtype** (str) - Its dtype.
    - **shape** (tuple[int]) - Its shape.
    - **min** (Union[float, None]) - The smallest finite value, with its sign; None if no value is finite.
    - **max** (Union[float, None]) - The largest finite value.
    - **non_finite** (int) - How many values are infinite or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    min: Optional[float]
    max: Optional[float]
    non_finite: int

    def __str__(self) -> str:
        finite = "no finite value" if self.min is None else f"{self.min:.4g} to {self.max:.4g}"
        return f"{self.dtype} {self.shape}: {finite}" + (f", {self.non_finite} non-finite" if self.non_finite else "")


class OverflowTrace(NamedTuple):
    """
    The first overflow that :func:`locate_overflow` found; `print(trace)` says it in words.

    - **found** (bool) - Whether there is an overflow. If not, the other fields have no meaning.
    - **loss_scale** (float) - The scale by which the loss was multiplied.
    - **cell** (str) - The name of the cell.
    - **direction** (str) - ``"forward"`` or ``"backward"`` .
    - **what** (str) - ``"output"`` in the forward. In the backward, ``"gradient"`` for the gradient of the cell's
      input; the name of a parameter of the cell for its gradient; or ``"loss"`` for the gradient of the loss itself,
      which is the loss scale.
    - **kind** (str) - ``"inf"`` , ``"NaN"`` , or ``"saturated"`` for a finite value of 65504 or beyond.
    - **index** (tuple[int]) - Where in the tensor the first such value is.
    - **value** (float) - The value.
    - **tensor** (Range) - The tensor that holds it.
    - **inputs** (tuple[Range]) - The cell's inputs in the forward.
    - **note** (str) - A remark, or an empty text.
    """

    found: bool
    loss_scale: float
    cell: str = ""
    direction: str = ""
    what: str = ""
    kind: str = ""
    # Hides a method of tuples.
    index: tuple[int, ...] = ()  # type: ignore[assignment]
    value: float = 0.0
    tensor: Optional[Range] = None
    inputs: tuple[Range, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        scale = written_scale(self.loss_scale)
        if not self.found:
            none = f"No overflow: all values are finite and below 65504 in float16 at loss scale {scale}."
            return f"{none} {self.note}".rstrip()
        what = {"output": "its output", "gradient": "the gradient that it passes back"}.get(self.what)
        what = what or f"the gradient of {'the loss' if self.what == 'loss' else self.what}"
        lines = [
            f"The first overflow at loss scale {scale} is in the {self.direction} of {self.cell}: "
            f"{what} is {self.kind} ({self.value:g}) at {self.index}",
            f"tensor: {self.tensor}",
            *(f"the cell's input {i}: {each}" for i, each in enumerate(self.inputs)),
        ]
        return "\n  ".join([*lines, self.note] if self.note else lines)


def locate_overflow(network: Network, inputs: Batch, *, loss_scale: float) -> OverflowTrace:
    """
    Replays one batch and finds the first cell that overflows in the forward, or otherwise in the backward.

    A cell overflows if its output, or in the backward the gradient of its input or of its parameters, holds an
    infinity, a NaN, or an absolute value of 65504 or more. Float32 can hold values beyond 65504, so they are named
    there only if nothing else overflows, or if they are inputs of the cell that does: then a cast to float16 made them
    infinite.

    It runs in PyNative mode and updates nothing. The network is the same afterwards, except for dropout's random
    numbers if training itself runs in PyNative mode.

    If training reads the status register of an NPU, and that is raised though no value shows an overflow, the note of
    the trace says so.

    If a network takes a gradient in its forward (a gradient penalty), PyNative mode loses second derivatives, and a
    warning says that the gradients lack them. A network that runs only in graph mode can't be looked into, nor can
    functions that `vmap` or `jacrev` transform.

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell of this package, whose networks are searched one after the other; or a function, as for
            :func:`profile_gradients`.
        inputs (tuple[Tensor]): The network's inputs, or its only input.
        loss_scale (float): The scale by which the loss is multiplied.

    Returns:
        OverflowTrace.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If `loss_scale` is out of range.
        RuntimeError: If the network fails, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore import dtype as mstype
        >>> from ms_lossscale import locate_overflow
        >>> net = nn.SequentialCell(*[nn.Dense(2, n, weight_init="ones", has_bias=False) for n in (2, 1)])
        >>> network = nn.WithLossCell(net.to_float(mstype.float16), nn.MSELoss())
        >>> inputs = Tensor(np.full((4, 2), 2e4, np.float32)), Tensor(np.zeros((4, 1), np.float16))
        >>> trace = locate_overflow(network, inputs, loss_scale=1.0)
        >>> trace.cell, trace.direction, trace.kind, trace.index
        ('_backbone.1', 'forward', 'inf', (0, 0))
    """
    owner = "locate_overflow"
    parts = trained_parts(owner, network)
    loss_scale = check_scale(owner, "loss_scale", loss_scale)
    inputs = as_inputs(owner, "inputs", inputs)
    detector = default_overflow_detector()
    reads_register = isinstance(detector, FloatStatusRegister)
    held, notes = None, [on_not_finite(not_finite_weights_of(parts))]
    with replay(owner, parts) as replayed:
        if reads_register:
            # Reading clears it.
            detector(())
        for loss_and_grads in replayed:
            search = Search(loss_and_grads, loss_scale, loss_and_grads.part.names())
            with running(owner, "these inputs"):
                search.run(inputs)
            traces, first = search.traces, search.first_overflow()
            if first is not None:
                # A cast may have made infinite what an earlier cell put out.
                is_cast = first.direction == "forward" and any(_is_cast(its, first.tensor) for its in first.inputs)
                return search.explained(traces[0] if is_cast else first)
            held = held or (search.explained(traces[0]) if traces else None)
        if reads_register and detector(()).asnumpy():
            notes.append(_IN_REGISTER)
    return held or OverflowTrace(False, loss_scale, note=" ".join(filter(None, notes)))


class Search:
    """
    Runs a batch, within `replay`, and records the values that leave float16's range.

    Attributes:
        inputs (dict): The ranges of the inputs, by a cell and the number of its call, in the order of the calls.
    """

    def __init__(self, loss_and_grads, loss_scale, names):
        self._loss_and_grads, self._part = loss_and_grads, loss_and_grads.part
        self._loss_scale, self._names = loss_scale, names
        self.inputs, self._batch = {}, ()
        # The traces with their moments, and how many there were when each weight's gradient was computed.
        self._found, self._of_weights = [], {}
        # The calls of cells whose output got a gradient that was not finite already.
        self._received = set()
        self._root = names[id(self._part.network)]

    def run(self, batch):
        network, noted = self._part.network, functools.partial(self._note, "backward", "gradient")
        self._batch = _ranges(self._part.inputs(batch))
        callbacks = self._note_output, self._note_gradient_in, noted, self._note_weight
        with watching(network, self._names, *callbacks):
            _, grads = self._loss_and_grads.of(self._loss_scale, batch)
        cells = [cell for _, cell in network.cells_and_names()]
        owners = {id(its): self._names[id(cell)] for cell in cells for its in cell.get_parameters(expand=False)}
        for weight, grad in zip(self._part.weights, grads):
            place = Place(owners.get(id(weight), self._root), 0, 0)
            self._note("backward", weight.name, place, grad, self._of_weights.get(id(weight), math.inf) - 0.5)
        return True

    def _note_weight(self, weight):
        self._of_weights[id(weight)] = len(self._found)

    def _note_output(self, place, tensor, inputs):
        self.inputs[place.cell, place.call] = _ranges(inputs)
        self._note("forward", "output", place, tensor)

    def _note_gradient_in(self, place, tensor):
        if place.cell == self._root and tensor.dtype == mstype.float16:
            # No cell has computed it: it is the loss scale.
            self._note("backward", "loss", place, tensor)
        elif not are_finite([tensor]):
            self._received.add((place.cell, place.call))

    def _note(self, direction, what, place, tensor, moment=None):
        moment, values = len(self._found) if moment is None else moment, as_array(tensor)
        # Not <, so that a NaN counts.
        out_of_range, non_finite = ~(np.abs(values) < FLOAT16.largest), ~np.isfinite(values)
        if not out_of_range.any():
            return
        index = tuple(int(i) for i in np.argwhere(non_finite if non_finite.any() else out_of_range)[0])
        value, at = float(values[index]), (place.cell, place.call)
        kind = "NaN" if np.isnan(value) else "inf" if np.isinf(value) else "saturated"
        (its_range,), inputs = _ranges([tensor]), self.inputs.get(at, ())
        came_in = at in self._received if direction == "backward" else any(each.non_finite for each in inputs)
        note = _CAME_IN if came_in else ""
        if what == "loss":
            scale = written_scale(self._loss_scale)
            note = f"The loss is float16, and the loss scale {scale} does not fit: cast the loss to float32."
        its = (place.cell, direction, what, kind, index, value, its_range, inputs, note)
        self._found.append((moment, OverflowTrace(True, self._loss_scale, *its)))

    @property
    def traces(self):
        """The values out of range, in the order of execution."""
        return [trace for _, trace in sorted(self._found, key=lambda each: each[0])]

    def first_overflow(self):
        """Returns the first overflow, ignoring values that only float16 could not hold; None if there is none."""
        return next((each for each in self.traces if not _is_held(each)), None)

    def explained(self, trace):
        """Returns the trace, with a remark if the overflow did not arise in the network, or only float16 has it."""
        if any(each.non_finite for each in self._batch):
            return trace._replace(note="The batch itself holds values that are not finite.")
        held = f"{trace.tensor.dtype} holds this value; float16 could not." if _is_held(trace) else ""
        return trace._replace(note=on_not_finite(not_finite_weights_of([self._part])) or trace.note or held)


def _is_held(trace):
    """Returns whether the dtype of the value could hold it, and only float16 could not."""
    return trace.kind == "saturated" and trace.tensor.dtype != "Float16" and abs(trace.value) != FLOAT16.largest


def _is_cast(its, output):
    """Returns whether the input of a cell whose output overflows is what float16 can't hold, before or after a cast."""
    is_large = its.min is not None and max(-its.min, its.max) >= FLOAT16.largest
    return its.non_finite or (output.dtype == "Float16" and is_large)


def _ranges(values):
    """Returns the ranges of those of these values that are tensors of floating-point numbers."""
    ranges = []
    for array, dtype in ((as_array(each), str(each.dtype)) for each in values if is_float(each)):
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        ranges.append(Range(dtype, array.shape, low, high, array.size - finite.size))
    return tuple(ranges)
