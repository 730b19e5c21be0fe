"""Finds the first overflow of a batch."""

import functools
import itertools
import math
from typing import NamedTuple, Optional

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import Batch, check_scale
from ms_lossscale._output import written_scale
from ms_lossscale._values import are_finite, as_array, is_float, on_not_finite
from ms_lossscale.diagnosis.arguments import as_inputs, not_finite_weights_of, trained_parts
from ms_lossscale.diagnosis.cell_watch import CellWatch, Place, WatchError
from ms_lossscale.diagnosis.distribution import FLOAT16
from ms_lossscale.diagnosis.register_watch import cleared_afterwards, raised_in, register_of
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.function_network import Network

_ONLY_IN_GRAPH = (
    "The network runs in graph mode only, in which cells can't be watched: only its loss and the gradients of its "
    "weights were looked at."
)
# The remark on an overflow that occurred between cells, by direction.
_CAME_IN = {
    "forward": "Its input is not finite already, though no cell put that out: it was computed between cells, in the "
    "construct of the cell around it.",
    "backward": "The gradient that flows into its output is not finite already, though no cell passed that back: it "
    "was computed between cells, in the construct of the cell around it.",
}


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

    def fits(self, largest: float) -> bool:
        """Returns whether the absolute values of the finite elements are below a bound."""
        return self.min is None or self.max is None or max(-self.min, self.max) < largest

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
      which is the loss scale. ``"register"`` if no value shows an overflow.
    - **kind** (str) - ``"inf"`` , ``"NaN"`` , or ``"saturated"`` for a finite value of 65504 or beyond; ``"register"``
      if all values are finite but the status register of an NPU is raised. The fields from `index` to `inputs` then
      have no meaning.
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
        at_scale = f"at loss scale {written_scale(self.loss_scale)}"
        if not self.found:
            none = f"No overflow: all values are finite and below 65504 in float16 {at_scale}."
            return f"{none} {self.note}".rstrip()
        if self.kind == "register":
            return (
                f"At loss scale {written_scale(self.loss_scale)} all values are finite, but the status register is up "
                f"in the {self.direction} of {self.cell}.\n  {self.note}"
            )
        what = {
            "output": "its output",
            "gradient": "the gradient that it passes back",
            "loss": "the gradient of the loss",
        }.get(self.what, f"the gradient of {self.what}")
        lines = [
            f"The first overflow {at_scale} is in the {self.direction} of {self.cell}: {what} "
            f"is {self.kind} ({self.value:g}) at {self.index}",
            f"  tensor: {self.tensor}",
        ]
        lines += [f"  the cell's input {i}: {each}" for i, each in enumerate(self.inputs)]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


def locate_overflow(network: Network, inputs: Batch, *, loss_scale: float) -> OverflowTrace:
    """
    Replays one batch and finds the first cell that overflows in the forward, or otherwise in the backward.

    A cell overflows if its output, or in the backward the gradient of its input or of its parameters, holds an
    infinity, a NaN, or an absolute value of 65504 or more. Float32 can hold values beyond 65504, so they are named
    there only if nothing else overflows, or if they are inputs of the cell that does: then a cast to float16 made them
    infinite.

    It runs in PyNative mode and updates nothing. The network is the same afterwards, except for dropout's random
    numbers if training itself runs in PyNative mode.

    Where training reads the status register of an NPU and no value shows an overflow, it reads and clears the register
    around each cell, and names the first one that raises it. In the backward it tries a tiny loss scale, too: an
    operator that raises the register even there does so whatever its values are.

    If a network takes a gradient in its forward (a gradient penalty), PyNative mode loses second derivatives. The
    gradients of the parameters are then computed in graph mode. Those of the cells lack the second derivatives, so an
    overflow that occurs only there is named at a parameter. If a network runs only in graph mode, only the loss and the
    gradients of the parameters are looked at, and the trace says so. Functions that `vmap` or `jacrev` transform can't
    be watched either.

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
    detector, in_register = register_of(network), None
    held, notes = None, [on_not_finite(not_finite_weights_of(parts))]
    with replay(owner, parts) as replayed, cleared_afterwards(detector):
        for loss_and_grads in replayed:
            search = Search(loss_and_grads, loss_scale)
            with running(owner, "these inputs"):
                search.run(inputs)
            overflow = search.first_overflow()
            if overflow is not None:
                return search.explained(overflow)
            if held is None and search.overflows:
                held = search.explained(search.overflows[0])
            if loss_and_grads.only_in_graph:
                notes.append(_ONLY_IN_GRAPH)
            elif detector is not None and in_register is None:
                loss_and_grads.restore()
                with running(owner, "these inputs"):
                    in_register = register_trace(loss_and_grads, detector, loss_scale, inputs)
        if in_register is not None:
            return in_register
    return held or OverflowTrace(False, loss_scale, note=" ".join(filter(None, notes)))


def register_trace(loss_and_grads, detector, loss_scale, batch):
    """Returns a trace of where only the status register shows an overflow, None if it does not, within `replay`."""
    raised = raised_in(loss_and_grads, detector, loss_scale, batch)
    if raised is None:
        return None
    part = loss_and_grads.part
    remarks = [on_batch(_ranges(part.inputs(batch))), on_not_finite(part.not_finite_weights())]
    note = " ".join(filter(None, remarks)) or raised.remark()
    return OverflowTrace(True, loss_scale, raised.cell, raised.direction, "register", "register", note=note)


class _Overflow(NamedTuple):
    """A value out of range: its moment, the number of the cell's call, and whether its dtype can hold it."""

    moment: int
    call: int
    held_by_dtype: bool
    trace: OverflowTrace


class Search:
    """
    Runs batches, within `replay`, and records the values that leave float16's range.

    Attributes:
        part (TrainedPart): The network.
        overflows (list[_Overflow]): These values, in order.
        inputs (dict): The ranges of the inputs, by a cell and the number of its call, in the order of the calls.
    """

    def __init__(self, loss_and_grads, loss_scale):
        self._loss_and_grads = loss_and_grads
        self.part = loss_and_grads.part
        self._loss_scale = loss_scale
        # They are in order once the search has run.
        self.overflows = []
        self.inputs = {}
        self._moments = itertools.count()
        # The moment when each weight's gradient was computed.
        self._moments_of_weights = {}
        # The cells whose output got a gradient that was out of range already.
        self._received = set()
        self._root = self.part.cell_names()[id(self.part.network)]
        self._owners = self.part.owners()

    def run(self, batch):
        """Returns the overflows."""
        note_gradient = functools.partial(self._note, "backward", "gradient")
        watch = CellWatch(self.part, self._note_output, self._note_gradient_in, note_gradient, self._note_weight)
        self._batch = _ranges(self.part.inputs(batch))
        try:
            with watch.watching():
                _, grads = self._loss_and_grads.in_pynative(self._loss_scale, batch)
        except WatchError:
            raise
        except Exception as error:
            grads = self._run_in_graph(error, batch)
        if self._loss_and_grads.takes_gradient:
            _, grads = self._loss_and_grads.correct(self._loss_scale, batch)
        for weight, grad in zip(self.part.weights, grads):
            place = Place(self._owners.get(id(weight), self._root), 0, 0)
            moment = self._moments_of_weights.get(id(weight), math.inf)
            self._note("backward", weight.name, place, grad, moment)
        self.overflows.sort(key=lambda overflow: overflow.moment)
        return self.overflows

    def _run_in_graph(self, error, batch):
        loss, grads = self._loss_and_grads.in_graph_instead(error, self._loss_scale, batch)
        self.overflows.clear()
        self.inputs.clear()
        self._note("forward", "output", Place(self._root, 0, 0), loss)
        # The backward goes from the last weight to the first.
        for weight in reversed(self.part.weights):
            self._note_weight(weight)
        return grads

    def _note_weight(self, weight):
        self._moments_of_weights[id(weight)] = next(self._moments)

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
        moment = next(self._moments) if moment is None else moment
        values = as_array(tensor)
        # Not <, so that a NaN counts.
        out_of_range = ~(np.abs(values) < FLOAT16.largest)
        if not out_of_range.any():
            return
        non_finite = ~np.isfinite(values)
        exact = values.dtype == np.float16 or (np.abs(values) == FLOAT16.largest).any()
        held_by_dtype = not (non_finite.any() or exact)
        index = tuple(int(i) for i in np.argwhere(non_finite if non_finite.any() else out_of_range)[0])
        value = float(values[index])
        kind = "NaN" if np.isnan(value) else "inf" if np.isinf(value) else "saturated"
        (its_range,), inputs = _ranges([tensor]), self.inputs.get((place.cell, place.call), ())
        trace = OverflowTrace(
            True, self._loss_scale, place.cell, direction, what, kind, index, value, its_range, inputs
        )
        self.overflows.append(_Overflow(moment, place.call, held_by_dtype, trace))

    def first_overflow(self):
        """Returns the first overflow, ignoring values that only float16 could not hold; None if there is none."""
        for overflow in self.overflows:
            if not overflow.held_by_dtype:
                return self.overflows[0] if self._comes_of_a_cast(overflow) else overflow
        return None

    def came_in(self, overflow):
        """Returns whether what the cell got was not finite already: an input, or the gradient of its output."""
        if overflow.trace.direction == "forward":
            return any(each.non_finite for each in overflow.trace.inputs)
        return (overflow.trace.cell, overflow.call) in self._received

    def _comes_of_a_cast(self, overflow):
        """Returns whether the first cell to overflow got what float16 can't hold, before or after a cast."""
        trace = overflow.trace
        return trace.direction == "forward" and any(
            each.non_finite or (trace.tensor.dtype == "Float16" and not each.fits(FLOAT16.largest))
            for each in trace.inputs
        )

    def explained(self, overflow):
        """Returns the trace of an overflow, with a remark."""
        return overflow.trace._replace(note=self._remark(overflow))

    def _remark(self, overflow):
        trace = overflow.trace
        if on_batch(self._batch):
            return on_batch(self._batch)
        weights = self.part.not_finite_weights()
        if weights:
            return on_not_finite(weights)
        if self._loss_and_grads.only_in_graph:
            return _ONLY_IN_GRAPH
        if trace.what == "loss":
            return (
                f"The loss is float16, and the loss scale {written_scale(self._loss_scale)} does not fit: cast the "
                f"loss to float32."
            )
        if self.came_in(overflow):
            return _CAME_IN[trace.direction]
        if overflow.held_by_dtype:
            return f"{trace.tensor.dtype} holds this value; float16 could not."
        return ""


def on_batch(ranges):
    """Returns a sentence on a batch that is not finite, empty if it is."""
    return "The batch itself holds values that are not finite." if any(each.non_finite for each in ranges) else ""


def _ranges(values):
    """Returns the ranges of those of these values that are tensors of floating-point numbers."""
    ranges = []
    for tensor in filter(is_float, values):
        array = as_array(tensor)
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        ranges.append(Range(str(tensor.dtype), array.shape, low, high, array.size - finite.size))
    return tuple(ranges)
