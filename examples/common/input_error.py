"""What a script says, in one line, of arguments, data or folders that are wrong."""


class InputError(Exception):
    """What is wrong, for the user."""
