"""Arguments: their types for type checkers, and checks whose messages say what was passed and what is wrong."""

import numbers
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, Union

import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import Dataset

T = TypeVar("T")

OneOrEach = Union[T, Sequence[T]]
AfterUpdate = Union[nn.Cell, Callable[[], Any]]
StrPath = Union[str, os.PathLike[str]]
Batch = Union[Tensor, np.ndarray, Sequence[Union[Tensor, np.ndarray, float]]]
Batches = Union[Dataset, Iterable[Batch]]


def describe(value):
    """Returns the value and its type, for an error message."""
    text = repr(value)
    if len(text) > 200:
        text = text[:197] + "..."
    return f"{text} of type '{type(value).__name__}'"


def listed(names, most):
    """Returns the first names and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_cell(owner, name, value, cure):
    """Raises a TypeError unless `value` is a Cell."""
    if not isinstance(value, nn.Cell):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a Cell, but got {describe(value)}. {cure}")


def check_cells(owner, name, value):
    """Raises unless `value` is a non-empty list, tuple or CellList of Cells. Returns it as a tuple."""
    if not isinstance(value, (list, tuple, nn.CellList)):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a list of Cells, but got {describe(value)}.")
    if not len(value):
        raise ValueError(f"For '{owner}', the argument '{name}' must not be empty.")
    for i, cell in enumerate(value):
        check_cell(owner, f"{name}[{i}]", cell, "Pass a list of Cells.")
    return tuple(value)


def looks_like_optimizer(value: Any) -> bool:
    """Returns whether `value` is a Cell with `parameters`, as all optimizers are."""
    return isinstance(value, nn.Cell) and hasattr(value, "parameters")


def check_one_each(owner, networks, optimizers):
    """Raises a ValueError unless there are as many networks as optimizers."""
    if len(networks) != len(optimizers):
        raise ValueError(
            f"For '{owner}', the arguments 'networks' and 'optimizers' must have the same length, but got "
            f"{len(networks)} and {len(optimizers)}. Pass one loss cell for each optimizer."
        )


def one_each(owner, name, value, count):
    """Returns a list of `count` values, one for each network: those of a list or tuple, or one value repeated."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"For '{owner}', the argument '{name}', if it is a list, must have one entry for each of the {count} "
            f"networks, but got {len(value)}: {value!r}."
        )
    return list(value)


def check_bool(owner: str, name: str, value: Any) -> bool:
    """Raises a TypeError unless `value` is a bool. Returns it."""
    if not isinstance(value, bool):
        raise TypeError(f"For '{owner}', the argument '{name}' must be True or False, but got {describe(value)}.")
    return value


def check_number(owner: str, name: str, value: Any) -> float:
    """Raises a TypeError unless `value` is a real number and not a bool. Returns it as a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a number, but got {describe(value)}.")
    return float(value)


def check_positive_int(owner: str, name: str, value: Any) -> int:
    """Raises unless `value` is an integer >= 1 that fits an int32 counter. Returns it as an int."""
    return check_int_from(owner, name, value, 1)


def check_int_from(owner: str, name: str, value: Any, low: int) -> int:
    """Raises unless `value` is an integer >= `low` that fits an int32 counter. Returns it as an int."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"For '{owner}', the argument '{name}' must be an integer >= {low}, but got {describe(value)}.")
    value = int(value)
    if not low <= value < 2**31:
        raise ValueError(f"For '{owner}', the argument '{name}' must be >= {low} and < 2**31, but got {value}.")
    return value


def check_between(owner: str, name: str, value: Any, low: float, high: float) -> float:
    """Raises unless `value` is a number strictly between `low` and `high`. Returns it as a float."""
    value = check_number(owner, name, value)
    if not low < value < high:
        raise ValueError(f"For '{owner}', the argument '{name}' must be > {low:g} and < {high:g}, but got {value:g}.")
    return value


def check_scale(owner: str, name: str, value: Any) -> float:
    """
    Raises unless `value` can be a loss scale: a finite number > 0 whose reciprocal, by which gradients are multiplied,
    is not subnormal in float32, since graph mode flushes such numbers to zero. Returns it as a float.
    """
    value = check_number(owner, name, value)
    if not 2.0**-126 <= value <= 2.0**126:
        raise ValueError(
            f"For '{owner}', the argument '{name}' must be a finite number > 0, from 2**-126 to 2**126 so that its "
            f"reciprocal is one too, but got {value!r}. A power of two such as 2.0**16 is a good choice."
        )
    return value
