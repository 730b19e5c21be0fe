"""What a loop passes on of what a call returned."""

import numbers

import numpy as np
from mindspore import Tensor


def check_outputs(owner, cell, outputs, shapes):
    """
    Raises a ValueError unless these are what the cell, given by its name, returned: a loss, and what the dict `shapes`
    names, in its order.
    """
    wanted = [("numbers", None), *(("bools" if name == "overflow" else "numbers", its) for name, its in shapes.items())]
    if not all(isinstance(value, Tensor) for value in outputs[: len(wanted)]) or not _fit(outputs, wanted):
        words = [f"'{name}', {kind} of shape {shape}" for name, (kind, shape) in zip(shapes, wanted[1:])]
        raise ValueError(
            f"For '{owner}', there must be all {len(wanted)} Tensors that the {cell} returns, in this order: the loss; "
            f"{'; '.join(words)}; but got {_described(outputs)}. Pass what the call of the watched cell returned: "
            f"{owner.split('.')[-1]}(*cell(x, y))."
        )


def check_loss_and_overflow(owner, outputs):
    """Raises a ValueError unless these are the loss of a ManualStep and what its `end` returned."""
    if not _fit(outputs, [("numbers", None), ("bools", ())]) or any(output is not None for output in outputs[2:]):
        raise ValueError(
            f"For '{owner}', with a ManualStep there must be two values, the loss and what 'end' returned, a bool, in "
            f"this order, but got {_described(outputs)}: {owner.split('.')[-1]}(loss, overflow)."
        )


def _fit(outputs, wanted):
    """Returns whether outputs begin with what is wanted: pairs of what they hold and their shape, None for any."""
    for (holds, shape), output in zip(wanted, outputs):
        form = _form(output)
        if form is None or form[0] != holds or shape not in (None, form[1]):
            return False
    return len(outputs) >= len(wanted)


def _form(value):
    """Returns what a value holds, and its shape; None if it is neither a Tensor, an array, a number nor a bool."""
    if not isinstance(value, (Tensor, np.ndarray, np.bool_, numbers.Real)):
        return None
    dtype = value.dtype if isinstance(value, Tensor) else np.asarray(value).dtype
    return "bools" if str(dtype).lower() == "bool" else "numbers", tuple(np.shape(value))


def _described(values):
    forms = [f"{form[0]} of shape {form[1]}" if (form := _form(value)) else repr(value) for value in values]
    return f"{len(values)}: {'; '.join(forms)}" if values else "none"
