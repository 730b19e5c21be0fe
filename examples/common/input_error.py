"""The error that a script shows in one line for wrong arguments, data or folders."""


class InputError(Exception):
    """The user's input is wrong; the message says how."""
