"""Writing into the memory that Parameters have, which compiled code uses."""

from mindspore import ops

from ms_lossscale._failed_calls import forget_failed_calls


def write_in_place(values):
    """
    Writes in PyNative mode or between steps.

    Args:
        values (list[tuple[Parameter, Tensor]]): What to write to, and a tensor of the same shape, which is cast.
    """
    if values:
        forget_failed_calls()
    for parameter, value in values:
        value = ops.cast(value, parameter.dtype)
        try:
            ops.assign(parameter, value)
        except RuntimeError:
            # A view, as `parameter.set_data(value.reshape(...))` makes it one, is refused.
            parameter.copy_(value)
