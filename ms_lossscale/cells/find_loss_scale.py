"""Finds the initial loss scale by trying a batch, without making a step."""

import math
import warnings
from typing import Any, Union

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._mindspore import write_in_place
from ms_lossscale._output import written_scale
from ms_lossscale._values import not_finite_weights, on_not_finite, on_unreached
from ms_lossscale.cells.first_call import ChecksFirstCall
from ms_lossscale.overflow_detector import FloatStatusRegister
from ms_lossscale.step.forward_backward import inputs_of

# How many powers of two below the floor are tried if all others overflow, and how far below the largest clean one of
# them the floor should be.
_BELOW, _HEADROOM = 24, 2.0**4
_SMALLEST = 2.0**-126


class FindsLossScale(ChecksFirstCall):
    """The method of the training cells that finds a loss scale."""

    # What tries a batch, for each step. It is made and compiled for the first batch.
    _trials = None

    def find_loss_scale(self, *inputs: Any) -> Union[float, list[float]]:
        """
        Finds the loss scale to begin with. It runs a batch at powers of two between the `min_loss_scale` and the
        `max_loss_scale` of the :class:`DynamicLossScale`. Then it sets the scale to half of the largest one at which
        nothing overflows, which leaves headroom, but not below `min_loss_scale`.

        Nothing else changes: no weight moves, no step is counted, the update rule takes no step, and side effects of
        the forward are undone. Each scale that is tried costs a forward and a backward. With the default range five are
        tried; graph mode adds one compilation.

        Call `set_train()` first: the networks run in their present mode, and `Model.train` sets it only later. Within
        an accumulation cycle, the scale applies from the next cycle on, as with
        :meth:`ScaledTrainOneStepCell.set_loss_scale`. Several loss scales are searched one after the other; those that
        never move stay as they are. In a parallel job, all ranks must call this, each with its own batch, and find the
        same scale.

        Args:
            *inputs (Any): The inputs of a step.

        Returns:
            float, the loss scale that was set; a list if each network has its own.

        Raises:
            RuntimeError: If the batch overflows at every one of these scales (the message says at which smaller one it
                does not, if any), or if no loss scale is a
                :class:`DynamicLossScale`. The scale then stays as it was.

        Examples:
            >>> import numpy as np
            >>> from mindspore import Tensor, nn
            >>> from mindspore import dtype as mstype
            >>> from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
            >>> network = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros").to_float(mstype.float16)
            >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
            >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale())
            >>> x, y = Tensor(np.ones((8, 4), np.float32)), Tensor(np.full((8, 1), 10.0, np.float32))
            >>> cell.set_train().find_loss_scale(x, y)
            1024.0
            >>> cell.counters()
            {'applied_steps': 0, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
        """
        if all(its.min_loss_scale is None for its in self._loss_scales):
            raise RuntimeError(
                f"For '{type(self).__name__}', 'find_loss_scale()' needs a loss scale that moves by itself, but got a "
                f"{type(self._loss_scales[0]).__name__}. Construct the cell with a DynamicLossScale, or set a scale "
                f"with set_loss_scale(value)."
            )
        self._check_call(inputs)
        if not self._compared:
            self.compare_ranks()
        self._check_loaded()
        if self._trials is None:
            self._trials = [step.make_trial() for step in self.steps]
        before = [(its, its.get_loss_scale()) for its in self._loss_scales]
        # For each step that is tried, whether any gradient of each optimizer was not zero at any scale.
        reached: dict[int, Any] = {}
        try:
            found = [scale for i in range(len(self._trials)) for scale in self._found(i, inputs, reached)]
        finally:
            _set_in_place(before)
        for remark in filter(None, (self._on_weights(), on_unreached(self._numbers_of_unreached(reached)))):
            warnings.warn(f"For '{self._owner}', 'find_loss_scale()': {remark}", RuntimeWarning, stacklevel=2)
        found = self._of_loss_scales(found)
        self.set_loss_scale(found)
        return found

    def _found(self, i, inputs, reached):
        """Returns the scales of step `i`: the found ones, or those that can't move as they are."""
        loss_scales = list(self.steps[i].scaling.loss_scales)
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
        if self.each_decides:
            inputs = inputs_of(self._owner, i, self.network_inputs, inputs)
        self._put_memory_back()
        with self._explaining_errors():
            overflowed, any_nonzero = self._trials[i](*inputs)
            overflowed = overflowed.asnumpy()
        reached[i] = np.logical_or(reached.get(i, False), [flag.asnumpy() for flag in any_nonzero])
        self._others.has_run()
        memory = self.steps[i].forward_state.memory
        memory.settle(lambda: True)
        memory.has_run()
        return overflowed.reshape(-1)

    def _largest_clean(self, loss_scale, is_clean, inputs):
        powers, tried = _powers_of_two(loss_scale), set()
        found = _largest(powers, is_clean, tried)
        # But a scale may also be too small, if something divides by a gradient that became zero.
        others = (power for power in reversed(powers) if power not in tried and is_clean(power))
        found = found or next(others, None)
        if found is None:
            below = [max(powers[0] / 2.0**k, _SMALLEST) for k in range(_BELOW, 0, -1)]
            self._raise_none_found(loss_scale, powers, _largest(below, is_clean, tried), inputs)
        return found

    def _raise_none_found(self, loss_scale, powers, below, inputs):
        """Raises an error that says what to do, given the largest clean scale below the floor, if there is one."""
        of_network = "" if self._is_one_loss_scale else f" of network {self._loss_scales.index(loss_scale)}"
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
            f"For '{type(self).__name__}', 'find_loss_scale()' found no loss scale{of_network}: this batch overflows "
            f"at every power of two from {floor} to {ceiling}. {cure}"
        )

    def _on_register(self, inputs, floor):
        """Says where the overflow is if a status register tells of it, which names nothing itself. It may be empty."""
        detectors = [step.forwards_and_backwards.overflow_detector for step in self.steps]
        if not any(isinstance(detector, FloatStatusRegister) for detector in detectors):
            return ""
        # The diagnoses know the training cells, whose modules can't import them.
        from ms_lossscale.diagnosis.locate_overflow import locate_overflow

        try:
            trace = locate_overflow(self, inputs, loss_scale=floor)
        except (RuntimeError, TypeError):
            # A network of graph mode only, or inputs that are no Tensors.
            return ""
        return str(trace) if trace.found else ""

    def _numbers_of_unreached(self, reached):
        """Returns the numbers of the optimizers all of whose gradients were zero, None for the only one."""
        if not self.each_decides:
            (of_all,) = reached.values()
            reached = dict(enumerate(of_all))
        return [i if self._several_networks else None for i, its in reached.items() if not np.any(its)]

    def _on_weights(self):
        networks = (step.forwards_and_backwards for step in self.steps)
        return on_not_finite(not_finite_weights(its for each in networks for its in each.get_parameters()))


def _largest(powers, is_clean, tried):
    """Returns the largest of these scales up to which all are clean, or None. Adds those that it tries to `tried`."""
    # Gradients grow with the scale, so nothing is tried below a clean scale or above one that overflows.
    low, high = 0, len(powers)
    while low < high:
        middle = (low + high) // 2
        tried.add(powers[middle])
        low, high = (middle + 1, high) if is_clean(powers[middle]) else (low, middle)
    return powers[low - 1] if low else None


def _powers_of_two(loss_scale):
    """Returns those from the floor to the ceiling, increasing; if there is none, the floor; if no range, the scale."""
    if loss_scale.min_loss_scale is None:
        return [loss_scale.get_loss_scale()]
    first = math.ceil(math.log2(loss_scale.min_loss_scale))
    last = math.floor(math.log2(loss_scale.max_loss_scale))
    return [2.0**exponent for exponent in range(first, last + 1)] or [loss_scale.min_loss_scale]


def _set_in_place(scales):
    """Sets scales temporarily, without telling accumulation cycles."""
    write_in_place([(loss_scale.scale_value, Tensor(value, mstype.float32)) for loss_scale, value in scales])
