"""Telling from the gradients of a weight whether float16 held them on the way."""

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale.diagnosis.float_format import FLOAT16

_SMALLEST_NORMAL = np.float32(2.0**FLOAT16.min_exponent)
# Below it bfloat16, with its 8 bits, holds numbers that float16 does not.
_FINER_IN_BFLOAT16 = np.float32(2.0**-17)


def computes_in_float16(network):
    """Whether cells or weights of a network say that they are float16. A cast in a `construct` does not show here."""
    return any(weight.dtype == mstype.float16 for weight in network.get_parameters()) or any(
        cell.get_flags().get("fp16", False) for _, cell in network.cells_and_names()
    )


class Float16Traces:
    """
    Looks at gradients as the backward returned them, times the loss scale.

    Attributes:
        all_fit (bool): Whether float16 holds each finite value exactly.
        lost (bool): Whether a value is zero, or so small that float16 holds it with fewer bits than a normal one.
    """

    def __init__(self):
        self.all_fit = True
        self.lost = False
        self._is_finer_than_bfloat16 = False

    def add(self, values):
        """Looks at the values of a float32 array."""
        if not self.all_fit:
            return
        finite = np.abs(values[np.isfinite(values)])
        sizes = finite[finite > 0]
        with np.errstate(over="ignore", under="ignore"):
            self.all_fit = bool((sizes.astype(np.float16) == sizes).all())
        self.lost |= sizes.size < finite.size or bool((sizes < _SMALLEST_NORMAL).any())
        bits_that_bfloat16_lacks = sizes.view(np.uint32) & 0xFFFF
        self._is_finer_than_bfloat16 |= bool(((bits_that_bfloat16_lacks > 0) | (sizes < _FINER_IN_BFLOAT16)).any())

    @property
    def are_evident(self):
        """Whether the values can hardly come of anything but float16: of float32 they would have more bits."""
        return self.all_fit and self._is_finer_than_bfloat16
