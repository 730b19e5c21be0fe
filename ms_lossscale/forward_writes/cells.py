"""Reads a cell's `construct`; what is strange ends here, as undecided."""

from ms_lossscale.forward_writes.mindspore_cells import is_of_mindspore
from ms_lossscale.forward_writes.mindspore_internals import forward_hooks_of, mark_buffers
from ms_lossscale.forward_writes.source import unwrapped
from ms_lossscale.forward_writes.values import NOTHING, Values, flat, is_plain


class Cells:
    """
    Args:
        reader (Reader): The other parts.
    """

    def __init__(self, reader):
        self._reader = reader
        self._returned = {}

    def read(self, cell):
        """Reads it for inputs of which nothing is known, once, with its hooks."""
        if id(cell) not in self._returned:
            self._returned[id(cell)] = NOTHING
            self._returned[id(cell)] = self._attempt(cell, self._read)
        return self._returned[id(cell)]

    def call(self, cell, args, kwargs):
        if all(is_plain(thing) for values in (*args, *kwargs.values()) for thing in flat(values).values()):
            return self.read(cell)
        return self._attempt(cell, self._call, args, kwargs)

    def _attempt(self, cell, reading, *args):
        mark_buffers(cell)
        try:
            return reading(cell, *args)
        except Exception as error:
            why = f"'{type(cell).__name__}.construct' can't be followed: {error or type(error).__name__}"
            self._reader.findings.doubt(Values.of(cell, *args), why)
            self._reader.functions.forget()
            return NOTHING

    def _read(self, cell):
        for hook in forward_hooks_of(cell):
            self._reader.calls.call(hook, [Values.of(cell), NOTHING, NOTHING], {})
        function, bound = _construct_of(cell)
        if is_of_mindspore(function):
            return NOTHING
        return self._reader.functions.call_with_unknown_inputs(function, bound)

    def _call(self, cell, args, kwargs):
        function, bound = _construct_of(cell)
        return self._reader.functions.call(function, [*bound, *args], kwargs)


def _construct_of(cell):
    """The function, and the cell as its first argument, unless `construct` was set to a plain function."""
    function, owner = unwrapped(cell.construct)
    return function, [] if owner is None else [Values.of(owner)]
