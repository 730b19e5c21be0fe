"""
What a name or an expression of the source may stand for: a set of objects.

Parameters, buffers, cells, functions and containers are the real ones. What only the source makes (a tuple, a closure,
a primitive) has a stand-in. A tensor that is neither a Parameter nor a buffer stands for nothing.
"""

import types

from mindspore import Parameter, Tensor, nn

from ms_lossscale.forward_writes.mindspore_internals import is_buffer

CELL_CONTAINERS = (nn.CellList, nn.SequentialCell, nn.CellDict)


class Values(dict):
    """A set of objects, by identity."""

    @classmethod
    def of(cls, *things):
        return cls((_key(thing), thing) for thing in things)


NOTHING = Values()


class StandIn:
    """Something that only the source makes. Two with the same `key` are the same."""

    def __init__(self, *key):
        self.key = (type(self).__name__, *key)


class Row(StandIn):
    """A tuple or list, with what each position may hold."""

    def __init__(self, positions):
        super().__init__(*(frozenset(values) for values in positions))
        self.positions = list(positions)


class Many(StandIn):
    """A container of unknown length, with what its elements may be."""

    def __init__(self, elements):
        super().__init__(frozenset(elements))
        self.elements = elements


class Text(StandIn):
    """A string of which a pattern is known."""

    def __init__(self, pattern):
        super().__init__(pattern)
        self.pattern = pattern


class Made(StandIn):
    """An object of a class that the source makes: `ops.Assign()`, `ops.HyperMap(function)`, a user's own."""

    def __init__(self, cls, args):
        super().__init__(id(cls), *(frozenset(values) for values in args))
        self.cls, self.args = cls, args


class Closure(StandIn):
    """A function that is defined within one."""

    def __init__(self, node, frame):
        super().__init__(id(node), id(frame))
        self.node, self.frame = node, frame


class Partial(StandIn):
    """A function with its first arguments."""

    def __init__(self, function, args):
        super().__init__(_key(function), *(frozenset(values) for values in args))
        self.function, self.args = function, args


class Parent(StandIn):
    """`super()`: an object seen from one of its classes on."""

    def __init__(self, cls, owner):
        super().__init__(id(cls), id(owner))
        self.cls, self.owner = cls, owner


class TensorMethod(StandIn):
    """A method of a Parameter or a buffer."""

    def __init__(self, tensor, name):
        super().__init__(id(tensor), name)
        self.tensor, self.name = tensor, name


def _key(thing):
    if isinstance(thing, StandIn):
        return thing.key
    if isinstance(thing, types.MethodType):  # Python makes one each time it is asked for.
        return id(thing.__func__), id(thing.__self__)
    return id(thing)


def is_state(thing):
    """Whether it is a Parameter or a registered buffer."""
    return isinstance(thing, Tensor) and (isinstance(thing, Parameter) or is_buffer(thing))


def is_plain(thing):
    """Whether it is a number, a string or None: known only where nothing unknown comes in as well."""
    return thing is None or isinstance(thing, (bool, int, float, str, Text))


def union(alternatives):
    """What may be any of several. One of these may stand for nothing, a tensor say: then it is no longer just None."""
    alternatives = list(alternatives)
    found = Values()
    for values in alternatives:
        found.update(values)
    if all(alternatives):
        return found
    return Values((key, thing) for key, thing in found.items() if not is_plain(thing))


def elements(values):
    """What iterating may give."""
    return union(_elements_of(thing) for thing in values.values())


def _elements_of(thing):
    inner = _held_by(thing)
    if inner is not None:
        return inner
    return Values.of(thing) if is_state(thing) else NOTHING


def _held_by(thing):
    """What a container holds; None for anything else."""
    if isinstance(thing, Row):
        return union(thing.positions)
    if isinstance(thing, Many):
        return thing.elements
    if isinstance(thing, (tuple, list, set, frozenset)):
        return Values.of(*thing)
    if isinstance(thing, dict):
        return Values.of(*thing.values())
    if isinstance(thing, CELL_CONTAINERS):
        return Values.of(*thing.cells())
    return None


def is_container(thing):
    return _held_by(thing) is not None


def flat(values, depth=3):
    """The same with what containers hold in their place."""
    for _ in range(depth):
        values = union(_held_by(t) if is_container(t) else Values.of(t) for t in values.values())
    return values


def positions(values, count):
    """What each of `count` names may be that `values` are unpacked into."""
    rows = [_positions_of(thing, count) for thing in values.values()]
    return [union(column) for column in zip(*rows)] if rows else [NOTHING] * count


def _positions_of(thing, count):
    if isinstance(thing, Row) and len(thing.positions) == count:
        return thing.positions
    if isinstance(thing, (tuple, list)) and len(thing) == count:
        return [Values.of(each) for each in thing]
    return [_elements_of(thing)] * count


def item(thing, index):
    """What `thing[index]` may be; an `index` of None is not known."""
    if is_state(thing):
        return Values.of(thing)
    try:
        if isinstance(thing, Row) and isinstance(index, int):
            return thing.positions[index]
        if index is not None and isinstance(thing, (tuple, list, dict, *CELL_CONTAINERS)):
            return Values.of(thing[index])
    except (IndexError, KeyError, TypeError):
        return NOTHING
    return _elements_of(thing)
