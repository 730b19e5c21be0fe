"""
Values and flags of a step that its networks share, of shape (), or of which each has its own, of shape (N,).

A flag of all may be joined with those of each: then it holds of each.
"""

from mindspore import ops


def of_network(i, value):
    """What network `i` has of it."""
    # Not by an index: graph mode then warns of all that is unpacked anywhere and not used, and its compiler crashes
    # (segmentation fault) where there are branches, too.
    return ops.unstack(value)[i] if value.ndim else value


def of_any_network(flag):
    """Whether it holds of any network, bool of shape ()."""
    return ops.ReduceAny()(flag) if flag.ndim else flag


def any_of(flag, others):
    """Whether any of them holds."""
    for each in others:
        flag = ops.logical_or(flag, each)
    return flag


def all_of(flags):
    """Whether all of a tuple hold."""
    flag = flags[0]
    for each in flags[1:]:
        flag = ops.logical_and(each, flag)
    return flag
