"""Checks what a loop passes on of a call: another order of its values, or another cell's, must not go unnoticed."""

import numbers

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._values import is_float


def check_outputs(owner, cell, outputs, overflow_shape, scale_shape, losses_shape):
    """
    Raises a ValueError unless these are what the cell, given by its name, returned, except aux. `losses_shape` is None
    if losses are not needed.
    """
    words = [
        "the loss",
        f"the overflow, bool of shape {overflow_shape}",
        f"the loss scale, float32 of shape {scale_shape}",
    ]
    fit = [is_float, _is_of(mstype.bool_, overflow_shape), _is_of(mstype.float32, scale_shape)]
    if losses_shape is not None:
        words.append(f"the losses, float32 of shape {losses_shape}")
        fit.append(_is_of(mstype.float32, losses_shape))
    if len(outputs) < len(fit) or not all(fits(output) for fits, output in zip(fit, outputs)):
        raise ValueError(
            f"For '{owner}', there must be all {len(fit)} Tensors that the {cell} returns, but got {_forms(outputs)}. "
            f"They are, in this order, {'; '.join(words)}. Pass what the call of the watched cell returned: "
            f"{owner.split('.')[-1]}(*cell(x, y))."
        )


def check_loss_and_overflow(owner, outputs):
    """Raises a ValueError unless these are the loss of a ManualStep and what its `end` returned."""
    fit = len(outputs) >= 2 and _is_number(outputs[0]) and _is_flag(outputs[1])
    if not fit or any(output is not None for output in outputs[2:]):
        raise ValueError(
            f"For '{owner}', with a ManualStep there must be two values, the loss and what 'end' returned, a bool, in "
            f"this order, but got {_forms(outputs)}: {owner.split('.')[-1]}(loss, overflow)."
        )


def _is_of(dtype, shape):
    return lambda value: isinstance(value, Tensor) and value.dtype == dtype and tuple(value.shape) == shape


def _is_number(value):
    """Returns whether it is a number, or an array of numbers, and no bool."""
    if isinstance(value, Tensor):
        return value.dtype != mstype.bool_
    return isinstance(value, (numbers.Real, np.ndarray)) and np.asarray(value).dtype.kind in "fiu"


def _is_flag(value):
    """Returns whether it is one bool."""
    if isinstance(value, Tensor):
        return value.dtype == mstype.bool_ and value.size == 1
    return isinstance(value, (bool, np.bool_, np.ndarray)) and np.asarray(value).dtype == bool and np.size(value) == 1


def _forms(values):
    """Returns what the values are, for a message."""
    forms = [f"{value.dtype} of shape {tuple(value.shape)}" if _has_form(value) else repr(value) for value in values]
    return f"{len(values)}: {'; '.join(forms)}" if values else "none"


def _has_form(value):
    return isinstance(value, (Tensor, np.ndarray))
