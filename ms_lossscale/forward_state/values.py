"""What a name or an expression of the source may stand for: a set of real objects, by identity."""

import builtins
import collections
import itertools

from mindspore import nn

CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque, nn.CellList, nn.SequentialCell, nn.CellDict)


class Row(tuple):
    """A tuple that the source makes: for each position, as a tuple, what it may be."""


class Bound:
    """A function with its first arguments, or one that is defined within another and shares its names."""

    def __init__(self, function, args, frame=None):
        self.function, self.args, self.frame = function, args, frame


class Frame:
    """The names of a function. What is assigned where ways part is added to what a name stood for."""

    def __init__(self, function):
        self.function, self.names, self.returned, self.parts = function, {}, {}, 0

    def read(self, name):
        if name in self.names:
            return self.names[name]
        code = self.function.__code__
        if self.function.__closure__ and name in code.co_freevars:
            return of(self.function.__closure__[code.co_freevars.index(name)].cell_contents)
        outside = self.function.__globals__
        return of(outside[name]) if name in outside else of(*filter(None, [getattr(builtins, name, None)]))

    def assign(self, name, values):
        self.names[name] = union(self.names.get(name, {}), values) if self.parts else values


def of(*things):
    """A set of objects, by identity."""
    return {id(thing): thing for thing in things}


def union(*many):
    return {key: thing for values in many for key, thing in values.items()}


def elements(values):
    """What iterating or indexing may give."""
    found = {}
    for thing in values.values():
        if isinstance(thing, Row):
            found.update(of(*itertools.chain(*thing)))
        elif isinstance(thing, (dict, nn.CellDict)):
            found.update(of(*thing.values()))
        else:
            found.update(of(*thing) if isinstance(thing, CONTAINERS) else of(thing))
    return found
