"""Runs a batch, and records where values leave float16's range, in the order of execution."""

import functools
import math

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._advice import on_not_finite
from ms_lossscale._output import written_scale
from ms_lossscale._values import are_finite, as_array, is_float
from ms_lossscale.diagnosis.arguments import kind_of, not_finite_in
from ms_lossscale.diagnosis.cell_watch import Place, watching
from ms_lossscale.diagnosis.distribution import FLOAT16
from ms_lossscale.diagnosis.overflow_trace import OverflowTrace, ranges_of

_CAME_IN = "It came in not finite already: it was computed between cells, in the construct of the one around them."
_ONE_SAMPLE = (
    "A batch of one sample, as a dataset's last one may be, has no variance, and training skips it at any loss scale. "
    "Leave it out (drop_remainder=True), or use a normalisation that is not over the batch."
)
_NORMALISATIONS = ("BatchNorm", "SyncBatchNorm")


def finite_state_of(cell):
    """Returns pairs of a name and a Tensor: what a cell, without those in it, holds that its forward may write."""
    parameters = cell.get_parameters(expand=False)
    state = [(parameter.name, parameter) for parameter in parameters if not parameter.requires_grad]
    state += cell.named_buffers(recurse=False)
    return [(name, tensor) for name, tensor in state if is_float(tensor) and are_finite([tensor])]


class OverflowSearch:
    """
    Runs a batch, within `replay`, and records the values that leave float16's range.

    Attributes:
        inputs (dict): The ranges of the inputs, by a cell and the number of its call, in the order of the calls.
    """

    def __init__(self, loss_and_grads, loss_scale, names, number):
        self._loss_and_grads = loss_and_grads
        self._part = loss_and_grads.part
        self._loss_scale = loss_scale
        self._names = names
        self._number = number
        self._root = names[id(self._part.network)]
        cells = [cell for _, cell in self._part.network.cells_and_names()]
        self._cells = {names[id(cell)]: cell for cell in cells}
        self._state = {name: finite_state_of(cell) for name, cell in self._cells.items()}
        self._on_not_finite = on_not_finite(not_finite_in([self._part]))
        self.inputs = {}
        self._batch = ()
        # The traces with their moments, and how many there were when each weight's gradient was computed.
        self._found = []
        self._of_weights = {}
        # The calls of cells whose output got a gradient that was not finite already.
        self._received = set()

    def run(self, batch):
        network = self._part.network
        self._batch = ranges_of(self._part.inputs(batch))
        note_gradient_out = functools.partial(self._note, "backward", "gradient")
        callbacks = self._note_output, self._note_gradient_in, note_gradient_out, self._note_weight
        with watching(network, self._names, *callbacks, on_call=self._note_state):
            _, grads = self._loss_and_grads.of(self._loss_scale, batch)
        owners = {
            id(weight): name for name, cell in self._cells.items() for weight in cell.get_parameters(expand=False)
        }
        for weight, grad in zip(self._part.weights, grads):
            place = Place(owners.get(id(weight), self._root), 0, 0)
            self._note("backward", weight.name, place, grad, self._of_weights.get(id(weight), math.inf) - 0.5)
        return True

    def _note_weight(self, weight):
        self._of_weights[id(weight)] = len(self._found)

    def _note_output(self, place, tensor, inputs):
        self.inputs[place.cell, place.call] = ranges_of(inputs)
        self._note("forward", "output", place, tensor)

    def _note_state(self, place):
        """Notes what a call of a cell has written. The outermost one may have written it for the cells inside."""
        for name in list(self._state) if place.cell == self._root else [place.cell]:
            for its_name, tensor in self._state.get(name, ()):
                if not are_finite([tensor]):
                    self._note("forward", its_name, place._replace(cell=name), tensor)
                    del self._state[name]
                    break

    def _note_gradient_in(self, place, tensor):
        if place.cell == self._root and tensor.dtype == mstype.float16:
            # No cell has computed it: it is the loss scale.
            self._note("backward", "loss", place, tensor)
        elif not are_finite([tensor]):
            self._received.add((place.cell, place.call))

    def _note(self, direction, what, place, tensor, moment=None):
        values = as_array(tensor)
        non_finite = ~np.isfinite(values)
        # Not <, so that a NaN counts.
        out_of_range = ~(np.abs(values) < FLOAT16.largest)
        if not out_of_range.any():
            return
        index = tuple(int(i) for i in np.argwhere(non_finite if non_finite.any() else out_of_range)[0])
        value = float(values[index])
        trace = OverflowTrace(
            found=True,
            loss_scale=self._loss_scale,
            cell=place.cell,
            direction=direction,
            what=what,
            kind="NaN" if np.isnan(value) else "inf" if np.isinf(value) else "saturated",
            index=index,
            value=value,
            tensor=ranges_of([tensor])[0],
            inputs=self.inputs.get((place.cell, place.call), ()),
            batch=self._number,
        )
        moment = len(self._found) if moment is None else moment
        self._found.append((moment, trace._replace(note=self._note_on(trace, place))))

    def _note_on(self, trace, place):
        """Returns what is to be remarked on an overflow."""
        if trace.what == "loss":
            scale = written_scale(self._loss_scale)
            return f"The loss is float16, and the loss scale {scale} does not fit: cast the loss to float32."
        if trace.direction == "forward" and trace.what != "output" and self._is_of_one_sample(trace):
            return _ONE_SAMPLE
        if trace.direction == "backward":
            came_in = (place.cell, place.call) in self._received
        else:
            came_in = any(values.non_finite for values in trace.inputs)
        return _CAME_IN if came_in else ""

    def _is_of_one_sample(self, trace):
        """Returns whether a normalisation over the batch had one value of each of its features."""
        is_normalisation = kind_of(self._cells[trace.cell]).startswith(_NORMALISATIONS)
        return (
            is_normalisation
            and bool(trace.inputs)
            and math.prod(trace.inputs[0].shape) == math.prod(trace.tensor.shape)
        )

    @property
    def traces(self):
        """The values out of range, in the order of execution."""
        return [trace for _, trace in sorted(self._found, key=lambda found: found[0])]

    def first_overflow(self):
        """Returns the first overflow, ignoring values that only float16 could not hold; None if there is none."""
        return next((trace for trace in self.traces if not _is_beyond_float16(trace)), None)

    def where_it_begins(self):
        """
        Returns the trace of the first overflow; if there is none, that of the first value that only float16 could not
        hold, as also if a cast of that one made it infinite. None if there is nothing at all.
        """
        first = self.first_overflow()
        is_forward = first is not None and first.direction == "forward"
        if first is None or (is_forward and any(_is_cast(values, first.tensor) for values in first.inputs)):
            first = next(iter(self.traces), None)
        return None if first is None else self.explained(first)

    def explained(self, trace):
        """Returns the trace, with a remark if the overflow did not arise in the network, or only float16 has it."""
        if any(values.non_finite for values in self._batch):
            return trace._replace(note="The batch itself holds values that are not finite.")
        beyond = f"{trace.tensor.dtype} holds this value; float16 could not." if _is_beyond_float16(trace) else ""
        return trace._replace(note=self._on_not_finite or trace.note or beyond)


def _is_beyond_float16(trace):
    """Returns whether the dtype of the value could hold it, and only float16 could not."""
    return trace.kind == "saturated" and trace.tensor.dtype != "Float16" and abs(trace.value) != FLOAT16.largest


def _is_cast(values, output):
    """Returns whether the input of a cell whose output overflows is what float16 can't hold, before or after a cast."""
    is_large = values.min is not None and max(-values.min, values.max) >= FLOAT16.largest
    return values.non_finite or (output.dtype == "Float16" and is_large)
