"""Writing into the memory that a Parameter has, which compiled code uses."""

from mindspore import ops


def write_in_place(parameter, value):
    """Writes a tensor of the Parameter's shape and dtype, in PyNative mode or between steps."""
    try:
        ops.assign(parameter, value)
    except RuntimeError:
        # A view, as `parameter.set_data(value.reshape(...))` makes it one, is refused.
        parameter.copy_(value)
