"""What a name or an expression in source code may stand for: a set of real objects, by identity."""

import functools
import types
import weakref

from mindspore import Tensor, nn, ops

from ms_lossscale.forward_state.ownership import is_disguised
from ms_lossscale.forward_state.referents import CONTAINERS, LEAVES, behind, contents

# Stands for a container that the source code makes. Its elements are in the same set.
SOME_CONTAINER = {"some": ()}


class Function:
    """A function whose source is read. The names and returned values of functions inside it count as its own."""

    def __init__(self, function, node, outer=None):
        self.function, self.node = function, node
        self.names, self.returned = (outer.names, outer.returned) if outer else ({}, {})


class Partial:
    """A function with its first arguments bound."""

    def __init__(self, function, args):
        self.function, self.args = function, args


def of(*things):
    """Returns objects by identity, together with the contents of containers."""
    found, waiting = {}, list(things)
    while waiting:
        thing = waiting.pop()
        if type(thing) in weakref.ProxyTypes:
            waiting.extend(behind(thing))
            continue
        key = (id(thing.__func__), id(thing.__self__)) if type(thing) is types.MethodType else id(thing)
        if key not in found and not is_disguised(type(thing)) and not isinstance(thing, LEAVES):
            found[key] = thing
            if isinstance(thing, (nn.CellDict, nn.CellList, nn.SequentialCell)):
                waiting.extend(thing._cells.values())
            elif isinstance(thing, CONTAINERS):
                waiting.extend(contents(thing))
    return found


def union(*many):
    return {key: thing for values in many for key, thing in values.items()}


def tensors(values):
    return {key: thing for key, thing in values.items() if isinstance(thing, Tensor)}


def elements(values, *but):
    """Returns what iterating over the values, or indexing them, may give."""
    return {key: thing for key, thing in values.items() if not isinstance(thing, (*CONTAINERS, *but))}


def has_containers(values):
    return any(isinstance(each, CONTAINERS) for each in values.values())


def called(values):
    return {key: thing for key, thing in values.items() if callable(thing) or isinstance(thing, (Function, Partial))}


def functions_in(values):
    kinds = (Function, Partial, types.FunctionType, types.MethodType, functools.partial, ops.MultitypeFuncGraph)
    return {key: thing for key, thing in values.items() if isinstance(thing, kinds)}
