"""The floating-point formats that a report asks about."""

from typing import NamedTuple

from mindspore import dtype as mstype


class FloatFormat(NamedTuple):
    """A binary format of IEEE 754's kind: bits of the significand, and the exponents of its normal numbers."""

    name: str
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self):
        """The largest finite number."""
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.max_exponent


FLOAT16 = FloatFormat("float16", 11, -14, 15)
BFLOAT16 = FloatFormat("bfloat16", 8, -126, 127)

_FORMATS = {mstype.float16: FLOAT16, mstype.bfloat16: BFLOAT16}


def float_format(owner, dtype):
    """The format of a dtype of MindSpore; raises unless there is one."""
    if dtype not in _FORMATS:
        raise ValueError(f"For '{owner}', the argument 'dtype' must be mstype.float16 or bfloat16, but got {dtype!r}.")
    return _FORMATS[dtype]
