"""Finds all objects that can be reached from networks. Their forwards can write to nothing else."""

import collections
import functools
import sys
import sysconfig
import types

from mindspore import Tensor, nn
from mindspore.experimental import optim as experimental_optim

from ms_lossscale.loss_scale import LossScale

SEQUENCES = (list, tuple, set, frozenset, collections.deque)
LEAVES = (str, bytes, int, float, complex, type(None), type(Ellipsis))
OPTIMIZERS = (nn.Optimizer, experimental_optim.Optimizer)
_CODE_OF_OTHERS = ("mindspore", "ms_lossscale", "_c_expression", "numpy")
_MODULE_OF_CLASS = type.__dict__["__module__"]


def reachable(networks):
    """
    Returns all objects that can be reached through attributes, containers, cells, helper objects, classes, and the
    closures, defaults and globals of functions. Of MindSpore, NumPy and Python, it enters only MindSpore's cells.
    """
    found, waiting = {}, collections.deque(networks)
    while waiting:
        thing = waiting.popleft()
        # A skipped step must change the state of a loss scale.
        if isinstance(thing, (*LEAVES, LossScale)) or id(thing) in found:
            continue
        found[id(thing)] = thing
        waiting.extend(_parts(thing))
    return list(found.values())


def is_users(thing):
    """Returns whether a class, function, module or object's class is the user's: not MindSpore's, ours or Python's."""
    module = module_of(thing)
    if module.startswith("ms_lossscale.selfcheck."):
        # The self-check's networks stand for a user's.
        return True
    return module.partition(".")[0] not in _CODE_OF_OTHERS and not _is_pythons(module.partition(".")[0])


def module_of(thing):
    """Returns the name of the module of a class, function or module, empty if it has none."""
    if isinstance(thing, types.ModuleType):
        module = vars(thing).get("__name__")
    elif isinstance(thing, types.FunctionType):
        # The module of its code: `functools.wraps` gives a wrapper the module name of the function inside.
        module = thing.__globals__.get("__name__")
    elif isinstance(thing, type):
        # Not by the attribute: a metaclass may compute it, or have its own in its place, as those of Cython 3.3 do.
        module = _MODULE_OF_CLASS.__get__(thing)
    else:
        module = getattr(thing, "__module__", None)
    return module if isinstance(module, str) else ""


@functools.cache
def _is_pythons(module):
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return module in sys.builtin_module_names
    return path.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in path


def _parts(thing):
    if isinstance(thing, Tensor):
        return ()
    if isinstance(thing, (collections.abc.Mapping, *SEQUENCES)):
        return thing.values() if isinstance(thing, collections.abc.Mapping) else thing
    if isinstance(thing, types.ModuleType):
        # What is used of it is found through the names in functions.
        return ()
    if isinstance(thing, type):
        return vars(thing).values() if is_users(thing) else ()
    return _parts_of_function(thing) or _parts_of_object(thing)


def _parts_of_function(thing):
    if isinstance(thing, (staticmethod, classmethod, types.MethodType)):
        return [thing.__func__, getattr(thing, "__self__", None)]
    if isinstance(thing, property):
        return [thing.fget]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if not isinstance(thing, types.FunctionType) or not is_users(thing):
        return ()
    return [
        *(held for cell in thing.__closure__ or () for held in _held_by(cell)),
        *(thing.__defaults__ or ()),
        *(thing.__kwdefaults__ or {}).values(),
        *vars(thing).values(),
        *_globals_of(thing),
    ]


def _held_by(cell):
    """Returns a list of what a closure's cell holds, empty if nothing has been assigned yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _globals_of(function):
    names = _names_in(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, types.ModuleType) and is_users(value):
            yield from (vars(value)[each] for each in names & vars(value).keys())


def _names_in(code):
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _parts_of_object(thing):
    if not isinstance(thing, nn.Cell) and not is_users(type(thing)):
        return ()
    classes = [cls for cls in type(thing).__mro__ if is_users(cls)]
    slots = (name for cls in classes for name in getattr(cls, "__slots__", ()))
    return [*getattr(thing, "__dict__", {}).values(), *classes, *(getattr(thing, name, None) for name in slots)]
