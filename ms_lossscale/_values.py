"""Values of tensors, read on the host."""

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._arguments import listed
from ms_lossscale._output import counted

_FLOATS = (mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16)
_MOST_NAMES = 5


def is_float(value):
    """Returns whether it is a Tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.dtype in _FLOATS


def as_array(tensor):
    """Returns the values in NumPy, in float32 if they are bfloat16, which NumPy does not have."""
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()


def are_finite(tensors):
    """Returns whether all values of all tensors are finite."""
    return all(np.isfinite(as_array(each)).all() for each in tensors)


def not_finite_weights(parameters):
    """
    Returns how many values are infinite or NaN, by the name of the parameter, for those that have any. In a parameter
    that is not trained, -inf does not count: it may be the mask of an attention.
    """
    counts = {}
    for parameter in filter(is_float, parameters):
        values = as_array(parameter)
        wrong = ~np.isfinite(values)
        if not parameter.requires_grad:
            wrong &= values != -np.inf
        if wrong.any():
            counts[parameter.name] = int(wrong.sum())
    return counts


def named_counts(counts):
    """Returns the names of such weights with their counts, as text: ``fc.weight (2 values)``."""
    return listed([f"{name} ({counted(number, 'value', 'values')})" for name, number in counts.items()], _MOST_NAMES)


def on_not_finite(counts):
    """Returns sentences on such weights, empty if there are none."""
    if not counts:
        return ""
    return (
        f"Weights themselves are infinite or NaN: {named_counts(counts)}. No loss scale and no cell in float32 mends "
        f"that. Go on from a checkpoint in which they are finite, and look for what wrote them: a checkpoint that was "
        f"loaded, or the optimizer (an eps of 1e-8 is 0 in float16)."
    )
