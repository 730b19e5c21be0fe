"""What a check is: a function with its claim as its docstring, which `expect`s what the claim says."""

import inspect
from typing import Callable, NamedTuple


class DoesNotHold(Exception):
    """What a claim says is not so."""


class Check(NamedTuple):
    """A claim and the function that tries it on a device."""

    name: str
    claim: str
    run: Callable
    needs: tuple
    quick: bool


# In the order in which they are defined.
CHECKS: list[Check] = []


def check(*needs, quick=False):
    """
    Makes a check of a function of a :class:`Device`. Its name, with dashes, is that of the check, and its docstring the
    claim, on one line. It `needs` attributes of the device without which there is nothing to check: a status register,
    say. It is `quick` if it is one of those that matter most.
    """

    def register(function):
        CHECKS.append(Check(function.__name__.replace("_", "-"), inspect.getdoc(function), function, needs, quick))
        return function

    return register


def expect(holds, message):
    """Goes on if it holds, and else ends the check with the message: what was expected and what came."""
    if not holds:
        raise DoesNotHold(message)


def expect_equal(actual, expected, what):
    expect(actual == expected, f"{what}: expected {expected}, got {actual}")


def values(cell):
    """The bytes of each Parameter."""
    return {name: parameter.asnumpy().tobytes() for name, parameter in cell.parameters_dict().items()}


def differing(values, others):
    """The names of the Parameters whose values are others."""
    return [name for name, value in values.items() if value != others[name]]
