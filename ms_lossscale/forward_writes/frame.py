"""The names of one function while it is read."""

import ast
import builtins

from ms_lossscale.forward_writes.values import NOTHING, Many, Values, is_container, union


class Frame:
    """
    Args:
        function (function): Whose globals and closure are meant.
        enclosing (Frame): That of the function around a closure, or None.
    """

    def __init__(self, function, enclosing=None):
        self.function, self.enclosing = function, enclosing
        self.names, self._returned = {}, []

    def read(self, name):
        frame = self
        while frame is not None:
            if name in frame.names:
                return frame.names[name]
            frame = frame.enclosing
        return self._read_outside(name)

    def _read_outside(self, name):
        function = self.function
        if function.__closure__ and name in function.__code__.co_freevars:
            cell = function.__closure__[function.__code__.co_freevars.index(name)]
            return Values.of(cell.cell_contents)
        if name in function.__globals__:
            return Values.of(function.__globals__[name])
        return Values.of(getattr(builtins, name)) if hasattr(builtins, name) else NOTHING

    def assign(self, name, values):
        self.names[name] = values

    def add(self, name, values):
        """The name may now stand for these as well."""
        self.names[name] = union([self.names.get(name, values), values])

    def grow(self, node, values):
        """If the node names a container, this may now hold these as well."""
        if isinstance(node, ast.Name) and any(is_container(thing) for thing in self.read(node.id).values()):
            self.names[node.id] = union([self.read(node.id), Values.of(Many(values))])

    def join(self, names):
        """What each name may be after one of two ways."""
        for name, values in names.items():
            self.add(name, values)

    def give_back(self, values):
        self._returned.append(values)

    @property
    def returned(self):
        return union(self._returned)
