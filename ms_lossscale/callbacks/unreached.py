"""Notices an optimizer to whose weights no gradient flows, by what the host can read between two steps."""

import numpy as np

from ms_lossscale._values import as_array, of_optimizers, why_unreached

# How many values of each weight are remembered, and after how many applied steps an unchanged weight is a sign: a
# learning rate may begin at zero.
_VALUES, _STEPS = 1024, 3


class Unreached:
    """
    Looks once, at the first report, whether an optimizer trains anything: at the norm of its gradients where
    `clip_norm` measures it, otherwise at whether any of its weights has changed since the training began.
    """

    def __init__(self, step, first_number):
        self._step = step
        optimizers = step.update.optimizers.optimizers
        self._numbers = [None] if first_number is None else range(first_number, first_number + len(optimizers))
        self._weights = [optimizer.parameters for optimizer in optimizers]
        self._before = [[_some_values(weight) for weight in weights] for weights in self._weights]
        self._is_done = False

    def look(self, applied_steps):
        """Returns sentences on such optimizers, given how many steps were applied; empty if there are none."""
        if self._is_done or applied_steps == 0:
            return ""
        norms = self._step.update.clipping.norms()
        if applied_steps < _STEPS and None in norms:
            return ""
        self._is_done = True
        zero = [number for number, norm in zip(self._numbers, norms) if norm == 0.0]
        unchanged = [
            number
            for number, norm, weights, before in zip(self._numbers, norms, self._weights, self._before)
            if norm is None and all(map(_is_unchanged, weights, before))
        ]
        self._before.clear()
        return " ".join(
            f"{what}. {why_unreached(numbers)}"
            for numbers, what in (
                (zero, f"The gradients of all weights{of_optimizers(zero)} are exactly zero"),
                (
                    unchanged,
                    f"No weight{of_optimizers(unchanged)} has changed in the first {applied_steps} steps: unless the "
                    f"learning rate is 0 so far, no gradient reaches any",
                ),
            )
            if numbers
        )


def _some_values(weight):
    values = as_array(weight).reshape(-1)
    return np.array(values[:: max(1, len(values) // _VALUES)])


def _is_unchanged(weight, before):
    # NaN is unequal to itself.
    return np.array_equal(_some_values(weight), before, equal_nan=True)
