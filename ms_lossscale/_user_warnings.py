"""Warnings at the line of the user's program."""

import os
import sys
import warnings

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the nearest line of the stack that is outside of this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
