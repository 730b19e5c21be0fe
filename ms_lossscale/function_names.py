"""What a function's code calls the Cells that it reaches."""

import collections
import functools
import itertools
import types

from mindspore import nn

from ms_lossscale._mindspore import written_class
from ms_lossscale.forward_state.reachable import names_in
from ms_lossscale.forward_state.referents import may_lead_on
from ms_lossscale.forward_state.static import instance_dict

# So many objects are looked at.
_LOOKS = 10_000


def names_of(function, cells):
    """Returns a name for each of these cells: the path that leads from the function's variables to it, or its class."""
    wanted, paths, seen = {id(cell) for cell in cells}, {}, set()
    waiting = collections.deque([("", function)])
    while waiting and len(paths) < len(wanted) and len(seen) < _LOOKS:
        path, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if id(thing) in wanted:
            paths[id(thing)] = path
        elif not issubclass(type(thing), nn.Cell):
            waiting.extend(_parts(path, thing))
    names = []
    for cell in cells:
        path = name = paths.get(id(cell)) or written_class(cell).__name__
        count = itertools.count(2)
        while name in names:
            name = f"{path}_{next(count)}"
        names.append(name)
    return names


def _parts(path, thing):
    """Returns what is in an object, by paths. What a function uses begins a path of its own."""
    kind = type(thing)
    if kind is types.FunctionType:
        code, closure = thing.__code__, thing.__closure__ or ()
        # An empty cell is a variable that has no value yet.
        parts = {name: each.cell_contents for name, each in zip(code.co_freevars, closure) if _has_value(each)}
        parts.update({name: thing.__globals__[name] for name in names_in(code) if name in thing.__globals__})
        defaults = thing.__defaults__ or ()
        parts.update(zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults))
        parts.update(thing.__kwdefaults__ or {})
        return list(parts.items())
    if kind is types.MethodType:
        return [*_parts("", thing.__func__), ("self", thing.__self__)]
    if kind is functools.partial:
        names = getattr(thing.func, "__code__", None)
        names = names.co_varnames if names else map(str, range(len(thing.args)))
        return [*zip(names, thing.args), *thing.keywords.items(), ("", thing.func)]
    if issubclass(kind, (list, tuple)):
        parts = enumerate(thing)
    elif issubclass(kind, dict):
        parts = thing.items()
    elif issubclass(kind, (type, types.ModuleType)):
        return []
    else:
        parts = instance_dict(thing).items() if may_lead_on(thing) else ()
        path = path or "self"
    return [(f"{path}.{name}", each) for name, each in parts]


def _has_value(cell):
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
