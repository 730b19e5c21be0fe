"""Checks what a loop passes on of a call: another order of its values, or another cell's, must not go unnoticed."""

import numbers

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._values import is_float

_DTYPES = {"overflow": mstype.bool_, "loss_scale": mstype.float32, "losses": mstype.float32}


def check_outputs(owner, cell, outputs, shapes):
    """
    Raises a ValueError unless these are what the cell, given by its name, returned: a loss, and what the dict `shapes`
    names, in its order.
    """
    wanted = [(_DTYPES[name], shape) for name, shape in shapes.items()]
    forms = [(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None for value in outputs[1:]]
    if not outputs or not is_float(outputs[0]) or forms[: len(wanted)] != wanted:
        words = [f"'{name}', {dtype} of shape {shape}" for name, (dtype, shape) in zip(shapes, wanted)]
        raise ValueError(
            f"For '{owner}', there must be all {1 + len(wanted)} Tensors that the {cell} returns, in this order: the "
            f"loss; {'; '.join(words)}; but got {_described(outputs)}. Pass what the call of the watched cell "
            f"returned: {owner.split('.')[-1]}(*cell(x, y))."
        )


def check_loss_and_overflow(owner, outputs):
    """Raises a ValueError unless these are the loss of a ManualStep and what its `end` returned."""
    fit = len(outputs) >= 2 and _is_number(outputs[0]) and _is_flag(outputs[1])
    if not fit or any(output is not None for output in outputs[2:]):
        raise ValueError(
            f"For '{owner}', with a ManualStep there must be two values, the loss and what 'end' returned, a bool, in "
            f"this order, but got {_described(outputs)}: {owner.split('.')[-1]}(loss, overflow)."
        )


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


def _described(values):
    forms = [
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else repr(value)
        for value in values
    ]
    return f"{len(values)}: {'; '.join(forms)}" if values else "none"
