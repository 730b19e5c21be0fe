"""Refuses scales and counts that no training can have, whatever loaded them."""

import numpy as np

from ms_lossscale._bounds import Bounded
from ms_lossscale._values import as_array


class PossibleValues:
    """
    Checks the scales and counts of a training cell. With an impossible one, training would go on without a word: a
    scale whose reciprocal is subnormal makes all gradients zero, and an infinite one skips every step.
    """

    def __init__(self, cell):
        self._owner = type(cell).__name__
        bounded = (each for _, each in cell.cells_and_names() if isinstance(each, Bounded))
        self._bounds = {its.parameter.name: its for each in bounded for its in each.bounds()}

    def parameters(self):
        """Returns the Parameters that hold these scales and counts."""
        return [its.parameter for its in self._bounds.values()]

    def check(self):
        """Checks the present values, which MindSpore's own functions may have loaded."""
        for name, its in self._bounds.items():
            what = f"For '{self._owner}', {name!r}, which was loaded,"
            self._check(its, {}, what, "Load another one before you go on.")

    def check_before_loading(self, parameters):
        """Checks the values of `parameters`, from names to Tensors, before they are written."""
        for name in self._bounds.keys() & parameters.keys():
            what = f"For '{self._owner}.load_state_dict', {name!r} of 'parameters'"
            cure = "Load another one, or leave this entry out with strict=False. Nothing was loaded."
            self._check(self._bounds[name], parameters, what, cure)

    @staticmethod
    def _check(bounds, parameters, what, cure):
        """Checks a value of `parameters`, or else the present one."""
        both = [its for its in (bounds.parameter, bounds.second) if its is not None]
        values, *second = (as_array(parameters.get(its.name, its)) for its in both)
        if not bounds.hold(values, *second):
            value = values.item() if values.size == 1 else np.array2string(values, separator=", ")
            raise ValueError(
                f"{what} must be {bounds.must_be}, but got {value}. This cell can't train with that: the checkpoint is "
                f"damaged, or of another training. {cure}"
            )
