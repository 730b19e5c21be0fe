"""Finds the initial loss scale by trying a batch, without making a step."""

import functools

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._mindspore import write_in_place
from ms_lossscale._output import written_scale
from ms_lossscale._powers_of_two import last_that_holds, powers_of_two
from ms_lossscale._user_warnings import warn_user
from ms_lossscale._values import not_finite_weights, on_not_finite, on_unreached
from ms_lossscale.cells.guard import explaining_errors
from ms_lossscale.overflow_detector import FloatStatusRegister

# How many powers of two below the floor are tried if all others overflow, and how far below the largest clean one of
# them the floor should be.
_BELOW, _HEADROOM = 24, 2.0**4
_SMALLEST = 2.0**-126


class LossScaleSearch:
    """
    Finds the loss scales of a training cell, see :meth:`TrainingCell.find_loss_scale`. `trials` is filled with what
    tries a batch, for each step, and compiled for the first batch.
    """

    def __init__(self, cell, trials):
        self._cell, self._owner = cell, type(cell).__name__
        self._steps = list(cell.steps)
        self._loss_scales = [its for step in self._steps for its in step.scaling.loss_scales]
        self._trials = trials

    def find(self, inputs):
        """Returns the scales that were found and set, as `get_loss_scale()` does."""
        if all(its.min_loss_scale is None for its in self._loss_scales):
            raise RuntimeError(
                f"For '{self._owner}', 'find_loss_scale()' needs a loss scale that moves by itself, but got a "
                f"{type(self._loss_scales[0]).__name__}. Construct the cell with a DynamicLossScale, or set a scale "
                f"with set_loss_scale(value)."
            )
        self._cell._before_step(inputs)
        if not self._trials:
            self._trials.extend(step.make_trial() for step in self._steps)
        before = [(its, its.get_loss_scale()) for its in self._loss_scales]
        # For each step that is tried, whether any gradient of each optimizer was not zero at any scale.
        reached = {}
        try:
            found = [scale for i in range(len(self._trials)) for scale in self._found(i, inputs, reached)]
        finally:
            _set_in_place(before)
        for remark in filter(None, (self._on_weights(), on_unreached(self._numbers_of_unreached(reached)))):
            warn_user(f"For '{self._owner}', 'find_loss_scale()': {remark}")
        found = self._cell._of_loss_scales(found)
        self._cell.set_loss_scale(found)
        return found

    def _found(self, i, inputs, reached):
        """Returns the scales of step `i`: the found ones, or those that can't move as they are."""
        loss_scales = list(self._steps[i].scaling.loss_scales)
        lowest = [(its, _powers_of_two(its)[0]) for its in loss_scales]
        found = []
        for j, its in enumerate(loss_scales):

            def is_clean(scale, j=j, its=its):
                # Of several, each is tried by itself: a register does not show whose gradients overflowed.
                _set_in_place([*lowest, (its, scale)])
                return not self._overflowed(i, inputs, reached)[j]

            if its.min_loss_scale is None:
                found.append(its.get_loss_scale())
            else:
                found.append(max(self._largest_clean(its, is_clean, inputs) / 2, its.min_loss_scale))
        return found

    def _overflowed(self, i, inputs, reached):
        """
        Tries step `i`, and notes whether any gradient is not zero. Returns for each of its loss scales whether an
        overflow was found.
        """
        inputs = self._cell._inputs_of_step(i, inputs)
        self._cell._guard.put_back()
        with explaining_errors(self._cell):
            overflowed, any_nonzero = self._trials[i](*inputs)
            overflowed = overflowed.asnumpy()
        reached[i] = np.logical_or(reached.get(i, False), [flag.asnumpy() for flag in any_nonzero])
        self._cell._guard.after(lambda _: True)
        return overflowed.reshape(-1)

    def _largest_clean(self, loss_scale, is_clean, inputs):
        powers, is_clean = _powers_of_two(loss_scale), functools.cache(is_clean)
        # Gradients grow with the scale. But one may also be too small, if something divides by a gradient that became
        # zero.
        found = last_that_holds(powers, is_clean) or next(filter(is_clean, reversed(powers)), None)
        if found is None:
            below = [max(powers[0] / 2.0**k, _SMALLEST) for k in range(_BELOW, 0, -1)]
            self._raise_none_found(loss_scale, powers, last_that_holds(below, is_clean), inputs)
        return found

    def _raise_none_found(self, loss_scale, powers, below, inputs):
        """Raises an error that says what to do, given the largest clean scale below the floor, if there is one."""
        of_network = "" if not self._cell.each_has_scale else f" of network {self._loss_scales.index(loss_scale)}"
        floor, ceiling = written_scale(powers[0]), written_scale(powers[-1])
        lines = "ms_lossscale.advise_float32(cell, [inputs]) names the cells that need float32"
        if below is None:
            cure = (
                self._on_weights()
                or self._on_register(inputs, powers[0])
                or (
                    f"Look for NaN in the data (the weights are finite): ms_lossscale.locate_overflow(cell, inputs, "
                    f"loss_scale={floor}) names where the overflow begins. If it is in float16, {lines}."
                )
            )
        else:
            lower = written_scale(max(below / _HEADROOM, _SMALLEST))
            cure = (
                f"At {written_scale(below)} it does not: what overflows is the backward, which is too large for this "
                f"floor. Let the scale fall further, DynamicLossScale(..., min_loss_scale={lower}), say; or keep the "
                f"floor, and {lines} for it."
            )
        raise RuntimeError(
            f"For '{self._owner}', 'find_loss_scale()' found no loss scale{of_network}: this batch overflows "
            f"at every power of two from {floor} to {ceiling}. {cure}"
        )

    def _on_register(self, inputs, floor):
        """Says where the overflow is if a status register tells of it, which names nothing itself. It may be empty."""
        detectors = [step.forwards_and_backwards.overflow_detector for step in self._steps]
        if not any(isinstance(detector, FloatStatusRegister) for detector in detectors):
            return ""
        # The diagnoses know the training cells, whose modules can't import them.
        from ms_lossscale.diagnosis.locate_overflow import locate_overflow

        try:
            trace = locate_overflow(self._cell, inputs, loss_scale=floor)
        except (RuntimeError, TypeError):
            # A network of graph mode only, or inputs that are no Tensors.
            return ""
        return str(trace) if trace.found else ""

    def _numbers_of_unreached(self, reached):
        """Returns the numbers of the optimizers all of whose gradients were zero, None for the only one."""
        if not self._cell.each_decides:
            (of_all,) = reached.values()
            reached = dict(enumerate(of_all))
        return [i if self._cell.several_networks else None for i, its in reached.items() if not np.any(its)]

    def _on_weights(self):
        networks = (step.forwards_and_backwards for step in self._steps)
        return on_not_finite(not_finite_weights(its for each in networks for its in each.get_parameters()))


def _powers_of_two(loss_scale):
    """Returns those from the floor to the ceiling, increasing; if there is none, the floor; if no range, the scale."""
    if loss_scale.min_loss_scale is None:
        return [loss_scale.get_loss_scale()]
    return powers_of_two(loss_scale.min_loss_scale, loss_scale.max_loss_scale) or [loss_scale.min_loss_scale]


def _set_in_place(scales):
    """Sets scales temporarily, without telling accumulation cycles."""
    write_in_place([(loss_scale.scale_value, Tensor(value, mstype.float32)) for loss_scale, value in scales])
