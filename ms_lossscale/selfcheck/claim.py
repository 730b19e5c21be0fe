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
    # What must be there: a status register, say.
    needs: tuple


# In the order in which they are defined.
CHECKS: list[Check] = []


def check(*needs):
    """
    Makes a check of a function of a :class:`Device`. Its name, with dashes, is that of the check, and its docstring the
    claim, on one line.

    Args:
        *needs (str): Attributes of the device without which there is nothing to check.
    """

    def register(function):
        CHECKS.append(Check(function.__name__.replace("_", "-"), inspect.getdoc(function), function, needs))
        return function

    return register


def expect(holds, message):
    """Goes on if it holds, and else ends the check with the message: what was expected and what came."""
    if not holds:
        raise DoesNotHold(message)


def expect_equal(actual, expected, what):
    expect(actual == expected, f"{what}: expected {expected}, got {actual}")
