"""How the values of tensors are spread over float32's range, and what a smaller format makes of them."""

import math
from typing import Any, NamedTuple, Optional

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import check_scale

# The exponents of float32, its subnormal numbers included.
_LOWEST, _HIGHEST = -149, 127
# Rounding to nearest moves what lies close above a power of two down, and close below the next one up. Where that
# decides between zero and non-zero, subnormal and normal, finite and infinite, differs between the formats: these parts
# of a binade, by the significand in [1, 2), are counted apart, and every such count is exact.
_PARTS = (np.nextafter(np.float32(1), np.float32(2)), *(np.float32(2 - 2.0**-bits) for bits in (7, 8, 10, 11)))
_PARTS_OF_A_BINADE = len(_PARTS) + 1
_CHUNK = 2**20

# The attributes of a Distribution.
COUNTS = ("count", "zeros", "non_finite", "min", "max")


class FloatFormat(NamedTuple):
    """A binary format of IEEE 754's kind: bits of the significand, and the exponents of its normal numbers."""

    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self):
        """The largest finite number."""
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.max_exponent


FLOAT16 = FloatFormat(11, -14, 15)
SMALLEST_NORMAL = np.float32(2.0**FLOAT16.min_exponent)
_FORMATS = {mstype.float16: FLOAT16, mstype.bfloat16: FloatFormat(8, -126, 127)}


def float_format(owner, dtype):
    """The format of a dtype of MindSpore; raises unless it is one of the two."""
    if dtype not in _FORMATS:
        raise ValueError(f"For '{owner}', the argument 'dtype' must be mstype.float16 or bfloat16, but got {dtype!r}.")
    return _FORMATS[dtype]


class Shares(NamedTuple):
    """
    What a cast does to values, as shares of all values.

    - **flushed** (float) - Values that are not zero, but are rounded to zero.
    - **subnormal** (float) - Values that are rounded to a subnormal number, which has fewer bits than a normal one.
    - **overflowed** (float) - Finite values that are rounded to infinity.
    """

    flushed: float
    subnormal: float
    overflowed: float


class Distribution:
    """
    Counts values by their size, in memory that does not grow with their number.

    Attributes:
        count (int): How many values there are.
        zeros (int): How many are zero.
        non_finite (int): How many are infinite or NaN.
        min (Union[float, None]): The smallest absolute value of those that are finite and not zero; None if there are
            none.
        max (Union[float, None]): The largest.
    """

    def __init__(self) -> None:
        self.count = self.zeros = self.non_finite = 0
        self.min: Optional[float] = None
        self.max: Optional[float] = None
        self._bins = np.zeros((_HIGHEST - _LOWEST + 1) * _PARTS_OF_A_BINADE, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts the values of an array, float16 or float32, of any shape."""
        values = values.reshape(-1)
        for start in range(0, values.size, _CHUNK):
            self._add(np.abs(values[start : start + _CHUNK].astype(np.float32)))

    def _add(self, values):
        finite = values[np.isfinite(values)]
        sizes = finite[finite > 0]
        self.count += values.size
        self.non_finite += values.size - finite.size
        self.zeros += finite.size - sizes.size
        if sizes.size == 0:
            return
        self._extend(float(sizes.min()), float(sizes.max()))
        halves, exponents = np.frexp(sizes)
        parts = np.searchsorted(_PARTS, halves * 2, side="right")
        bins = (exponents - 1 - _LOWEST) * _PARTS_OF_A_BINADE + parts
        self._bins += np.bincount(bins, minlength=self._bins.size)

    def _extend(self, low, high):
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)

    @property
    def share_of_zeros(self) -> float:
        """The share of the values that are zero, from 0 to 1."""
        return self.zeros / max(self.count, 1)

    def merge(self, other: "Distribution") -> None:
        """Adds everything that another distribution has counted."""
        self.count += other.count
        self.zeros += other.zeros
        self.non_finite += other.non_finite
        self._bins += other._bins
        if other.max is not None:
            self._extend(other.min, other.max)

    @property
    def is_all_zero(self) -> bool:
        """Whether there are values, and all of them are zero."""
        return 0 < self.count == self.zeros

    def histogram(self) -> dict[int, int]:
        """
        Counts the values that are finite and not zero, by binade: a dict from each exponent e to the number of values
        in :math:`[2^e, 2^{e+1})`. Empty binades are left out.
        """
        counts = self._bins.reshape(-1, _PARTS_OF_A_BINADE).sum(axis=1)
        return {int(i) + _LOWEST: int(counts[i]) for i in np.flatnonzero(counts)}

    def as_dict(self) -> dict[str, Any]:
        """The counts and the histogram in a form that JSON can hold."""
        return {**{name: getattr(self, name) for name in COUNTS}, "histogram": self.histogram()}

    def shares(self, loss_scale: float = 1.0, dtype: mstype.Type = mstype.float16) -> Shares:
        """
        What happens if the values are multiplied by a loss scale and cast, with rounding to nearest, ties to even.

        Args:
            loss_scale (float): A power of two. Default: ``1.0`` .
            dtype (mindspore.dtype): ``mstype.float16`` or ``mstype.bfloat16`` . Default: ``mstype.float16`` .

        Returns:
            Shares of all `count` values. Values that were not finite to begin with are in none of them.

        Raises:
            TypeError: If `loss_scale` is not a number.
            ValueError: If `loss_scale` is not a power of two from 2**-126 to 2**126, or `dtype` is neither of these.
        """
        significand, exponent = math.frexp(check_scale("shares", "loss_scale", loss_scale))
        if significand != 0.5:
            raise ValueError(
                f"For 'shares', the argument 'loss_scale' must be a power of two, but got {loss_scale!r}: the "
                f"counts by binade are exact only for these."
            )
        of = float_format("shares", dtype)
        shift = exponent - 1
        # From half of the smallest subnormal number on, itself excluded, nothing is rounded to zero.
        not_flushed = self._at(of.min_exponent - of.precision - shift, _PARTS[0])
        normal = self._at(of.min_exponent - 1 - shift, np.float32(2 - 2.0 ** (1 - of.precision)))
        infinite = self._at(of.max_exponent - shift, np.float32(2 - 2.0**-of.precision))
        counts = (
            self._bins[:not_flushed].sum(),
            self._bins[not_flushed:normal].sum(),
            self._bins[infinite:].sum(),
        )
        return Shares(*(int(count) / max(self.count, 1) for count in counts))

    @staticmethod
    def _at(exponent, significand):
        """The place in the bins where values from `significand * 2**exponent` on begin."""
        place = (exponent - _LOWEST) * _PARTS_OF_A_BINADE + _PARTS.index(significand) + 1
        return min(max(place, 0), (_HIGHEST - _LOWEST + 1) * _PARTS_OF_A_BINADE)


def sum_of(distributions):
    """A distribution that counts what all of these do."""
    total = Distribution()
    for distribution in distributions:
        total.merge(distribution)
    return total
