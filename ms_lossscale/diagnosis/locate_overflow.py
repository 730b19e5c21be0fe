"""Finding the first overflow of a batch."""

from typing import NamedTuple

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._check import check_scale
from ms_lossscale.diagnosis.batches import as_inputs
from ms_lossscale.diagnosis.cell_watch import CellWatch, as_array, cell_names, is_float
from ms_lossscale.diagnosis.float_format import FLOAT16
from ms_lossscale.diagnosis.overflow_trace import OverflowTrace, Range
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.trained_part import trained_parts


def locate_overflow(network, inputs, *, loss_scale):
    """
    Replays one batch and finds the first cell that overflows, in the forward or else in the backward.

    That is the first one whose output, or in the backward whose gradient of its input or of its parameters, holds an
    infinity, a NaN, or a value of 65504 or beyond, which float16 can't hold. Values beyond 65504 in float32 are named
    only where something overflows after them, or if nothing else does: float32 itself can hold them.

    Runs in PyNative mode and updates nothing: the network is the same afterwards.

    Args:
        network (Cell): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training cell of this
            package, whose networks are searched one after the other.
        inputs (tuple[Tensor]): The network's inputs; or the one input.
        loss_scale (float): The loss is multiplied by it.

    Returns:
        OverflowTrace.

    Raises:
        TypeError: If an argument has a wrong type, or the network returns no loss.
        ValueError: If `loss_scale` is out of range.
        RuntimeError: If the network fails.

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
    with replay([part.network for part in parts]):
        for part in parts:
            search = _Search(part, loss_scale)
            with running(owner, "these inputs"):
                search.run(inputs)
            first = search.first()
            if first is not None:
                return first
    return OverflowTrace(False, loss_scale)


class _Overflow(NamedTuple):
    """A value out of range, and when and where it was seen."""

    moment: int
    direction: str
    cell: str
    call: int
    what: str
    kind: str
    index: tuple
    value: float
    tensor: Range
    held_by_dtype: bool


class _Search:
    def __init__(self, part, loss_scale):
        self._part = part
        self._loss_scale = loss_scale
        self._overflows = {"forward": [], "backward": []}
        self._inputs = {}
        # When the gradient first reached each cell, counted in gradients.
        self._reached = {}
        self._gradients = 0
        self._owners = self._cells_of_parameters()

    def _cells_of_parameters(self):
        names = cell_names(self._part.prefix, self._part.network)
        return {
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
        with watch.watching():
            _, grads = self._part.loss_and_grads()(Tensor(self._loss_scale, mstype.float32), *inputs)
        for weight, grad in zip(self._part.weights, grads):
            owner = self._owners.get(id(weight), "")
            self._note(self._reached.get(owner, self._gradients), "backward", owner, 0, weight.name, grad)

    def _note_output(self, place, inputs, tensor):
        self._inputs[place.cell, place.call] = tuple(_range(as_array(each), each) for each in inputs if is_float(each))
        self._note(len(self._inputs), "forward", place.cell, place.call, "output", tensor)

    def _note_gradient_in(self, place, tensor):
        if self._gradients == 0 and tensor.dtype == mstype.float16:
            # No cell has computed this one: it is the loss scale.
            self._note(0, "backward", place.cell, place.call, "loss", tensor)
        self._gradients += 1
        self._reached.setdefault(place.cell, self._gradients)

    def _note_gradient_out(self, place, tensor):
        self._note(self._gradients + 1, "backward", place.cell, place.call, "gradient", tensor)

    def _note(self, moment, direction, cell, call, what, tensor):
        values = as_array(tensor)
        # Not <, so that a NaN counts.
        out_of_range = ~(np.abs(values) < FLOAT16.largest)
        if not out_of_range.any():
            return
        non_finite = ~np.isfinite(values)
        exact = values.dtype == np.float16 or (np.abs(values) == FLOAT16.largest).any()
        held_by_dtype = not (non_finite.any() or exact)
        index = tuple(int(i) for i in np.argwhere(out_of_range if held_by_dtype else non_finite | out_of_range)[0])
        value = float(values[index])
        kind = "NaN" if np.isnan(value) else "inf" if np.isinf(value) else "saturated"
        overflow = _Overflow(
            moment, direction, cell, call, what, kind, index, value, _range(values, tensor), held_by_dtype
        )
        self._overflows[direction].append(overflow)

    def first(self):
        """The first overflow as a trace, or None."""
        forward, backward = self._overflows["forward"], self._overflows["backward"]
        if any(not overflow.held_by_dtype for overflow in forward):
            return self._trace(min(forward, key=_moment))
        overflowed = [overflow for overflow in backward if not overflow.held_by_dtype]
        if overflowed:
            return self._trace(min(overflowed, key=_moment))
        held = forward or backward
        return self._trace(min(held, key=_moment)) if held else None

    def _trace(self, overflow):
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
        if overflow.held_by_dtype:
            return f"{overflow.tensor.dtype} holds this value; float16 could not."
        return ""


def _moment(overflow):
    return overflow.moment


def _range(values, tensor):
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    return Range(str(tensor.dtype), tuple(values.shape), low, high, int(values.size - finite.size))
