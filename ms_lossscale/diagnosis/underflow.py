"""Measures on one batch how much of a float16 network's gradients underflows at the present loss scale."""

from typing import NamedTuple, Optional

import mindspore
import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import listed
from ms_lossscale._output import percent, written_scale
from ms_lossscale.diagnosis.arguments import as_inputs, trained_parts
from ms_lossscale.diagnosis.distribution import SMALLEST_NORMAL
from ms_lossscale.diagnosis.profile_gradients import largest_scale
from ms_lossscale.diagnosis.replay import replay, running

# The share of a weight's values that a larger scale has to save, and how many names are shown.
_NOTABLE, _MOST_NAMES = 0.1, 5


DOWN, UP, HIGHEST = 2.0**4, 2.0**16, 2.0**64
_FINER_IN_BFLOAT16 = np.float32(2.0**-17)


class Float16Traces:
    """
    Examines gradients as the backward returned them, multiplied by the loss scale.

    Attributes:
        all_fit (bool): Whether float16 holds each finite value exactly.
        lost (bool): Whether a value is zero, or so small that float16 holds it with fewer bits than a normal one.
    """

    def __init__(self):
        self.all_fit, self.lost, self._is_finer_than_bfloat16 = True, False, False

    def add(self, values):
        """Examines the values of a float32 array."""
        if not self.all_fit:
            return
        finite = np.abs(values[np.isfinite(values)])
        sizes = finite[finite > 0]
        with np.errstate(over="ignore", under="ignore"):
            self.all_fit = bool((sizes.astype(np.float16) == sizes).all())
        self.lost |= sizes.size < finite.size or bool((sizes < SMALLEST_NORMAL).any())
        bits_that_bfloat16_lacks = sizes.view(np.uint32) & 0xFFFF
        self._is_finer_than_bfloat16 |= bool(((bits_that_bfloat16_lacks > 0) | (sizes < _FINER_IN_BFLOAT16)).any())

    @property
    def are_evident(self):
        """Whether the values almost certainly come from float16: float32 values would have more bits."""
        return self.all_fit and self._is_finer_than_bfloat16


def computes_in_float16(network):
    """Returns whether cells or weights say that they are float16. A cast in a `construct` does not count."""
    return any(weight.dtype == mstype.float16 for weight in network.get_parameters()) or any(
        cell.get_flags().get("fp16", False) for _, cell in network.cells_and_names()
    )


class Underflow(NamedTuple):
    """
    What underflows in the gradients of one loss, and at which loss scale it does not.

    Attributes:
        number (Union[int, None]): The number of the network, None for the only one.
        loss_scale (float): The present loss scale.
        sufficient (float): The one at which it does not.
        shares (dict): From the names of the weights that gain by it to their :class:`Lost` at both.
    """

    number: Optional[int]
    loss_scale: float
    sufficient: float
    shares: dict

    def __str__(self) -> str:
        of_network = "" if self.number is None else f" of network {self.number}"
        names = [f"{name} ({before}; {after})" for name, (before, after) in self.shares.items()]
        return (
            f"float16 loses gradients{of_network} at the present loss scale, {written_scale(self.loss_scale)}, of "
            f"which a scale of {written_scale(self.sufficient)} would keep more: {listed(names, _MOST_NAMES)}; first "
            f"the shares at the present scale, then at the larger one"
        )


class Lost(NamedTuple):
    """The shares of a weight's scaled gradients that are zero, and that are subnormal numbers of float16."""

    zeros: float
    subnormal: float

    def __str__(self) -> str:
        return f"{percent(self.zeros)} % zero, {percent(self.subnormal)} % subnormal"


class UnderflowWatch:
    """
    Measures underflow in the networks of a training cell, from time to time. What it finds in the gradients of a loss
    it tells once, and no longer looks there.
    """

    def __init__(self, owner, cell):
        self._owner, self._cell = owner, cell
        self._told = set()
        # What was learned of each part, so that a network is compiled once at most.
        self._before = {}

    def is_done(self):
        """Whether it has told of all losses."""
        return bool(self._before) and self._told >= self._before.keys()

    def look(self, batch):
        """Returns a list of what underflows in a batch, the inputs of the cell's call. Nothing is changed."""
        found = []
        batch = as_inputs(self._owner, "inputs", batch)
        parts = trained_parts(self._owner, self._cell)
        with replay(self._owner, parts, mindspore.get_context("mode")) as each_loss_and_grads:
            for i, loss_and_grads in enumerate(each_loss_and_grads):
                if i in self._told:
                    continue
                self._before[i] = loss_and_grads
                with running(self._owner, "the batch of this step"):
                    underflow = _find(loss_and_grads, batch)
                if underflow is not None:
                    self._told.add(i)
                    found.append(underflow)
        return found


def _find(loss_and_grads, batch):
    part = loss_and_grads.part
    present = _measure(loss_and_grads, part.loss_scale, batch)
    if present is None or not any(trace.all_fit and trace.lost for trace in present.traces.values()):
        return None
    if present.largest is not None and not _is_float16(part, present):
        return None
    scale, at_larger = part.loss_scale, present
    while at_larger.largest is None and scale * UP <= HIGHEST:
        scale *= UP
        at_larger = _measure(loss_and_grads, scale, batch)
        if at_larger is None:
            break
    if at_larger is not None and at_larger.largest is None:
        return None
    sufficient = scale if at_larger is None else largest_scale(at_larger.largest / scale)
    at_larger = None
    while at_larger is None and sufficient > part.loss_scale:
        at_larger = _measure(loss_and_grads, sufficient, batch)
        if at_larger is None:
            sufficient /= DOWN
    if at_larger is None or not _is_float16(part, present, at_larger):
        return None
    shares = {
        name: (before, at_larger.lost[name])
        for name, before in present.lost.items()
        if present.traces[name].all_fit and sum(before) - sum(at_larger.lost[name]) >= _NOTABLE
    }
    return Underflow(part.optimizer, part.loss_scale, sufficient, shares) if shares else None


class _Measured(NamedTuple):
    """The scaled gradients of a batch, by weight, and the largest one's size, None if all are zero."""

    traces: dict
    lost: dict
    largest: Optional[float]


def _measure(loss_and_grads, loss_scale, batch):
    """Runs forward and backward at a loss scale. Returns None if the loss or a gradient is not finite."""
    loss, grads = loss_and_grads.of(loss_scale, batch)
    loss_and_grads.restore()
    if not np.isfinite(loss.astype(mstype.float32).asnumpy()).all():
        return None
    measured = _Measured({}, {}, None)
    for weight, grad in zip(loss_and_grads.part.weights, grads):
        values = np.abs(grad.astype(mstype.float32).asnumpy())
        if not np.isfinite(values).all():
            return None
        measured.traces[weight.name] = Float16Traces()
        measured.traces[weight.name].add(values)
        zeros, subnormal = values == 0, (values > 0) & (values < SMALLEST_NORMAL)
        number = max(values.size, 1)
        measured.lost[weight.name] = Lost(int(zeros.sum()) / number, int(subnormal.sum()) / number)
        largest = float(np.max(values, initial=0.0))
        measured = measured._replace(largest=max(largest, measured.largest or 0.0) or None)
    return measured


def _is_float16(part, *measured):
    """Returns whether the backward computes in float16. Gradients that are all zero don't show it."""
    traces = (trace for each in measured for trace in each.traces.values())
    return computes_in_float16(part.network) or any(trace.are_evident for trace in traces)
