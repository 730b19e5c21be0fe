"""Writing into the memory that a Parameter has, which compiled code uses."""

from mindspore import ops

from ms_lossscale._failed_calls import forget_failed_calls


def write_in_place(parameter, value):
    """Writes a tensor of the Parameter's shape, cast to its dtype, in PyNative mode or between steps."""
    forget_failed_calls()
    value = ops.cast(value, parameter.dtype)
    try:
        ops.assign(parameter, value)
    except RuntimeError:
        # A view, as `parameter.set_data(value.reshape(...))` makes it one, is refused.
        parameter.copy_(value)
