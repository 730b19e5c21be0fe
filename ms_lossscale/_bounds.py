"""Which values the scales and counts that are kept in checkpoints can have."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mindspore import Parameter

from ms_lossscale._output import written_scale


class Bounds(NamedTuple):
    """What the values of a Parameter must be, in words and as a function of them."""

    parameter: Parameter
    must_be: str
    hold: Callable[[np.ndarray], bool]


class Bounded:
    """A Cell some of whose Parameters can't have every value."""

    def bounds(self) -> list[Bounds]:
        """Returns the bounds of its own Parameters, without those of the Cells in it."""
        raise NotImplementedError


def of_scale(parameter, smallest, largest, may_be_negative=False):
    """Returns the bounds of a loss scale. Its sign may have a meaning of its own."""

    def hold(values):
        values = np.abs(values) if may_be_negative else values
        # Both comparisons are False for NaN.
        return np.all((values >= smallest) & (values <= largest))

    return Bounds(parameter, f"a finite number > 0, from {written_scale(smallest)} to {written_scale(largest)}", hold)


def of_count(parameter, least=0):
    """Returns the bounds of a count."""
    return Bounds(parameter, f">= {least}", lambda values: np.all(values >= least))
