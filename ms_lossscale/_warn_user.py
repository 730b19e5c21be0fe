"""Warnings at the line of the user's program."""

import contextlib
import os
import sys
import warnings

import mindspore

# MindSpore's own functions lie between where it compiles, or calls a callback; contextlib's where a `with` ends.
_FOLDERS = [os.path.dirname(file) + os.sep for file in (__file__, mindspore.__file__)]
_NOT_THE_USERS = (*_FOLDERS, contextlib.__file__)


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the nearest line of the user's program: that which is outside of this package and of MindSpore."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level += 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
