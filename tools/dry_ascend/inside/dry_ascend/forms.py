"""Forms that many kernels have. A kernel gets all its arguments, the last of which is mostly its result."""

import numpy as np

from dry_ascend.memory import store, wide


def one(function):
    return lambda a: store(a[-1], function(wide(a[0])))


def two(function):
    return lambda a: store(a[-1], function(wide(a[0]), wide(a[1])))


def in_place(function):
    return lambda a: store(a[0], function(wide(a[0]), wide(a[1])))


def with_alpha(function, to):
    """An operator whose second operand is multiplied by a third, if there is one; its result goes to this argument."""
    return lambda a: store(a[to], function(wide(a[0]), wide(a[1]) * (1 if a[2] is None else a[2])))


def reduced(function):
    """Its arguments are x, axes (none: all), ..., the result."""

    def compute(a):
        x, axes, out = wide(a[0]), a[1], a[-1]
        axes = () if axes is None else tuple(int(axis) for axis in np.ravel(axes))
        result = function(x, axis=axes if axes and x.ndim else None)
        if np.size(result) != out.size:
            raise ValueError(f"a result of {np.size(result)} elements for {out.shape}")
        store(out, result)

    return compute


def first(a):
    store(a[-1], a[0])


def set_first(a):
    store(a[0], a[1])


def select(a):
    store(a[-1], np.where(a[0], a[1], a[2]))
