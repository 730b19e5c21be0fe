"""Finding the first overflow of a batch."""

from typing import NamedTuple

import numpy as np
from mindspore import dtype as mstype
from mindspore import nn

from ms_lossscale._arguments import Batch, check_scale
from ms_lossscale.diagnosis.batches import as_inputs
from ms_lossscale.diagnosis.cell_watch import CellWatch, as_array, can_be_hooked, cell_names, is_float
from ms_lossscale.diagnosis.float_format import FLOAT16
from ms_lossscale.diagnosis.loss_and_grads import LossAndGrads
from ms_lossscale.diagnosis.overflow_trace import OverflowTrace, Range
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.trained_part import trained_parts


def locate_overflow(network: nn.Cell, inputs: Batch, *, loss_scale: float) -> OverflowTrace:
    """
    Replays one batch and finds the first cell that overflows, in the forward or else in the backward.

    That is the first one whose output, or in the backward whose gradient of its input or of its parameters, holds an
    infinity, a NaN, or a value of 65504 or beyond, which float16 can't hold. Values beyond 65504 in float32, which can
    hold them, are named only if nothing else overflows, or if they were given to the cell that does: then it was a cast
    to float16 that made infinities of them.

    Runs in PyNative mode and updates nothing: the network is the same afterwards. Where training itself runs in
    PyNative mode, dropout goes on with other random numbers, whose state MindSpore keeps inside the operators.

    Where a network takes a gradient in its forward (a gradient penalty), PyNative mode loses the gradients of that
    gradient. The gradients of its parameters are then computed in graph mode; those of its cells lack them, so that
    such an overflow is named at a parameter.

    Args:
        network (Cell): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training cell of this
            package, whose networks are searched one after the other.
        inputs (tuple[Tensor]): The network's inputs; or the one input.
        loss_scale (float): The loss is multiplied by it.

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
    held_by_dtype = OverflowTrace(False, loss_scale)
    with replay([part.network for part in parts]) as restore:
        for part in parts:
            search = _Search(part, loss_scale, LossAndGrads(owner, part, restore))
            with running(owner, "these inputs"):
                search.run(inputs)
            overflow = search.first_overflow()
            if overflow is not None:
                return search.trace(overflow)
            held = search.first_held_by_dtype()
            if held is not None and not held_by_dtype.found:
                held_by_dtype = search.trace(held)
    return held_by_dtype


class _Overflow(NamedTuple):
    """A value out of range, and when and where it was seen."""

    moment: int
    direction: str
    cell: str
    call: int
    what: str
    kind: str
    # Hides a method of tuples.
    index: tuple  # type: ignore[assignment]
    value: float
    tensor: Range
    held_by_dtype: bool


class _Search:
    def __init__(self, part, loss_scale, loss_and_grads):
        self._part = part
        self._loss_scale = loss_scale
        self._loss_and_grads = loss_and_grads
        self._overflows = []
        self._inputs = {}
        # How many values were looked at.
        self._moment = 0
        # When each weight's gradient was computed.
        self._moments_of_weights = {}
        # The cells into whose output a gradient flowed that was out of range already.
        self._received = set()
        names = cell_names(self._part.prefix, self._part.network)
        self._root = names[id(self._part.network)]
        self._owners = {
            id(parameter): names[id(cell)]
            for _, cell in self._part.network.cells_and_names()
            for parameter in cell.get_parameters(expand=False)
        }

    def run(self, inputs):
        watch = CellWatch(
            self._part.prefix, self._part.network, self._note_output, self._note_gradient_in, self._note_gradient_out
        )
        inputs = self._part.inputs(inputs)
        self._batch = [_range(as_array(each), each) for each in inputs if is_float(each)]
        handles = [
            weight.register_hook(self._weight_hook(weight)) for weight in self._part.weights if can_be_hooked(weight)
        ]
        try:
            with watch.watching():
                _, grads = self._loss_and_grads.in_pynative(self._loss_scale, inputs)
        finally:
            for handle in handles:
                handle.remove()
        if self._loss_and_grads.takes_gradient:
            _, grads = self._loss_and_grads.correct(self._loss_scale, inputs)
        for weight, grad in zip(self._part.weights, grads):
            moment = self._moments_of_weights.get(id(weight), self._moment)
            self._note(moment, "backward", self._owners.get(id(weight), self._root), 0, weight.name, grad)

    def _weight_hook(self, weight):
        def hook(_gradient):
            self._moments_of_weights[id(weight)] = self._next_moment()

        return hook

    def _next_moment(self):
        self._moment += 1
        return self._moment

    def _note_output(self, place, inputs, tensor):
        self._inputs[place.cell, place.call] = tuple(_range(as_array(each), each) for each in inputs if is_float(each))
        self._note(self._next_moment(), "forward", place.cell, place.call, "output", tensor)

    def _note_gradient_in(self, place, tensor):
        if place.cell == self._root and tensor.dtype == mstype.float16:
            # No cell has computed this one: it is the loss scale.
            self._note(self._next_moment(), "backward", place.cell, place.call, "loss", tensor)
        elif not np.isfinite(as_array(tensor)).all():
            self._received.add((place.cell, place.call))

    def _note_gradient_out(self, place, tensor):
        self._note(self._next_moment(), "backward", place.cell, place.call, "gradient", tensor)

    def _note(self, moment, direction, cell, call, what, tensor):
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
        overflow = _Overflow(
            moment, direction, cell, call, what, kind, index, value, _range(values, tensor), held_by_dtype
        )
        self._overflows.append(overflow)

    def first_overflow(self):
        """The first overflow, but for what only float16 could not hold; None if there is none."""
        for overflow in sorted(self._overflows, key=_moment):
            if not overflow.held_by_dtype:
                return min(self._overflows, key=_moment) if self._comes_of_a_cast(overflow) else overflow
        return None

    def _comes_of_a_cast(self, overflow):
        """Whether the first cell to overflow was given what float16 can't hold, before or after a cast to it."""
        inputs = self._inputs.get((overflow.cell, overflow.call), ())
        return overflow.direction == "forward" and any(
            each.non_finite or (overflow.tensor.dtype == "Float16" and not each.fits(FLOAT16.largest))
            for each in inputs
        )

    def first_held_by_dtype(self):
        """The first value that float16 could not hold, but its dtype does; None if there is none."""
        return min(self._overflows, key=_moment, default=None)

    def trace(self, overflow):
        """What to tell of an overflow."""
        inputs = self._inputs.get((overflow.cell, overflow.call), ())
        return OverflowTrace(
            True,
            self._loss_scale,
            overflow.cell,
            overflow.direction,
            overflow.what,
            overflow.kind,
            overflow.index,
            overflow.value,
            overflow.tensor,
            inputs,
            self._remark(overflow, inputs),
        )

    def _remark(self, overflow, inputs):
        if any(each.non_finite for each in self._batch):
            return "The batch itself holds values that are not finite."
        if overflow.direction == "forward" and any(each.non_finite for each in inputs):
            return (
                "Its input is not finite already, though no cell put that out: it was computed between cells, in the "
                "construct of the cell around it."
            )
        if overflow.what == "loss":
            return (
                f"The loss is float16, and the loss scale {self._loss_scale:g} does not fit: cast the loss to float32."
            )
        if overflow.direction == "backward" and (overflow.cell, overflow.call) in self._received:
            return (
                "The gradient that flows into its output is not finite already, though no cell passed that back: it "
                "was computed between cells, in the construct of the cell around it."
            )
        if overflow.held_by_dtype:
            return f"{overflow.tensor.dtype} holds this value; float16 could not."
        return ""


def _moment(overflow):
    return overflow.moment


def _range(values, tensor):
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    return Range(str(tensor.dtype), tuple(values.shape), low, high, int(values.size - finite.size))
