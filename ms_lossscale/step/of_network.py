"""Values and flags of a step that its networks share, of shape (), or of which each has its own, of shape (N,)."""

from mindspore import ops


def of_network(i, value):
    """What network `i` has of it."""
    return value[i] if value.ndim else value


def of_any_network(flag):
    """Whether it holds of any network, bool of shape ()."""
    return ops.ReduceAny()(flag) if flag.ndim else flag
