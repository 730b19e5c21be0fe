"""Computes in NumPy what casts to float16 and bfloat16 do to values, and how values are distributed."""

from typing import NamedTuple

import numpy as np
from mindspore import dtype as mstype


class Shares(NamedTuple):
    flushed: float
    subnormal: float
    overflowed: float


def float16(values):  # Rounds float64 to float16.
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float64)


def bfloat16(values):
    """Rounds float64 to bfloat16 by integer arithmetic: to nearest, ties to even, keeping subnormal numbers."""
    significands, exponents = np.frexp(values)
    # The lowest bit of the result: 8 bits of precision, but no bit below 2**-133.
    lowest = np.maximum(exponents - 8, -133)
    rounded = np.ldexp(np.rint(np.ldexp(significands, exponents - lowest)), lowest)
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, values), rounded)


# The cast and the smallest normal number, by MindSpore's dtype.
CASTS = {mstype.float16: (float16, 2.0**-14), mstype.bfloat16: (bfloat16, 2.0**-126)}


def shares_of_cast(values, scale=1.0, dtype=mstype.float16):
    """Returns what the cast does to the finite values times the scale, exact in float64, as shares of all values."""
    cast, smallest_normal = CASTS[dtype]
    finite = values[np.isfinite(values)].astype(np.float64)
    after = np.abs(cast(finite * scale))
    groups = (finite != 0) & (after == 0), (after > 0) & (after < smallest_normal), np.isinf(after)
    return Shares(*(int(np.sum(group)) / values.size for group in groups))


def counts_of(values):  # What `Distribution.as_dict` must return for the values.
    finite = values[np.isfinite(values)]
    sizes = np.abs(finite[finite != 0]).astype(np.float64)
    counts = np.histogram(sizes, 2.0 ** np.arange(-149, 129))[0].tolist()
    return {
        "count": values.size,
        "zeros": int(np.sum(values == 0)),
        "non_finite": values.size - finite.size,
        "min": float(sizes.min()) if sizes.size else None,
        "max": float(sizes.max()) if sizes.size else None,
        "histogram": {i - 149: count for i, count in enumerate(counts) if count},
    }
