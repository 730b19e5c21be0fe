"""A branch that only writes."""


def only_if(condition, write, *args):
    """
    Calls `write` if `condition`, a bool tensor of shape (), says so. Returns the condition.

    MindSpore drops a branch that only writes, on a condition that the same function computes and returns: here it is
    given.
    """
    if condition:
        write(*args)
    return condition
