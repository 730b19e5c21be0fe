"""A check is a function whose docstring is its claim, and which `expect`s what the claim says."""

import inspect
from typing import Callable, NamedTuple


class DoesNotHold(Exception):
    """A claim does not hold."""


class Check(NamedTuple):
    """A claim, and the function that checks it on a device."""

    name: str
    claim: str
    run: Callable
    needs: tuple
    quick: bool


# In the order in which they are defined.
CHECKS: list[Check] = []


def check(*needs, quick=False):
    """
    Makes a check of a function of a :class:`Device`. The check has the function's name, with dashes, and its docstring,
    one line, as the claim. It `needs` attributes of the device without which there is nothing to check, a status
    register for example. It is `quick` if it is one of the most important ones.
    """

    def register(function):
        CHECKS.append(Check(function.__name__.replace("_", "-"), inspect.getdoc(function), function, needs, quick))
        return function

    return register


def expect(holds, message):
    """Ends the check with the message, which says what was expected and what came, unless it holds."""
    if not holds:
        raise DoesNotHold(message)


def expect_equal(actual, expected, what):
    expect(actual == expected, f"{what}: expected {expected}, got {actual}")


def values(cell):
    """Returns the bytes of each Parameter."""
    return {name: parameter.asnumpy().tobytes() for name, parameter in cell.parameters_dict().items()}


def differing(values, others):
    """Returns the names of the Parameters whose values differ."""
    return [name for name, value in values.items() if value != others[name]]
