"""Keeps what the tests look at where the package does not look: in a module of Python's."""

import sys

sys.hidden_from_the_package = {}


def hide(owner, state):
    sys.hidden_from_the_package[id(owner)] = owner, state


def hidden(owner):
    """Returns the state that was hidden for an owner, None if there is none."""
    return sys.hidden_from_the_package.get(id(owner), (owner, None))[1]


def forget_hidden():
    sys.hidden_from_the_package.clear()
