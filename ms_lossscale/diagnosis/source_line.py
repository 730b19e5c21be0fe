"""Which line of a cell's construct it is that makes values infinite or NaN, in PyNative mode."""

import contextlib
import linecache
import sys
from pathlib import Path

import numpy as np

from ms_lossscale.diagnosis.cell_watch import as_array, is_float


class LineWatch:
    """
    Looks, line by line, for the first local variable or result of a cell's construct that is not finite, though no
    argument was.

    Args:
        cell (Cell): Its construct is watched, not what that calls.
    """

    def __init__(self, cell):
        self._cell = cell
        self._found = None
        # Of the call that runs: the line that was begun last, and the values that it does not make.
        self._line, self._known = None, {}

    def __str__(self) -> str:
        """The file, the number and the text of the line; nothing if none was found."""
        if self._found is None:
            return ""
        file, number = self._found
        return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"

    @contextlib.contextmanager
    def watching(self):
        """A context for one forward."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, _):
        if frame.f_code.co_name != "construct" or frame.f_locals.get("self") is not self._cell:
            return None
        self._line, self._known = None, {}
        return self._step

    def _step(self, frame, event, result):
        if self._found is None and event in ("line", "return"):
            values = {id(each): each for each in (*frame.f_locals.values(), result) if is_float(each)}
            # The arguments, at first, and what is known to be finite.
            new = [each for key, each in values.items() if key not in self._known]
            if self._line is not None and not all(np.isfinite(as_array(each)).all() for each in new):
                self._found = self._line
            # Kept, so that an id goes to no other value.
            self._known.update(values)
            self._line = frame.f_code.co_filename, frame.f_lineno
        return self._step
