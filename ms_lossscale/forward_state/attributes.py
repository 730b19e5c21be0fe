"""Looks attributes up without running anything of the user's: no property, no descriptor and no `__getattr__`."""

import functools
import types

from mindspore import nn

from ms_lossscale.forward_state.ownership import is_platforms
from ms_lossscale.forward_state.static import attribute, class_attribute, instance_dict

_MISSING = object()
_REGISTERS = ("_params", "_cells", "_buffers")


def found_as(thing, name):
    """Returns a list of what an attribute of an object may be, empty if code of the user's computes it."""
    found, binds, owner = _looked_up(thing, name)
    if found is _MISSING or _code_of(found, binds, owner):
        return []
    if isinstance(found, functools.singledispatchmethod):
        return [types.MethodType(method, owner) for method in found.dispatcher.registry.values()]
    if not binds or not hasattr(type(found), "__get__"):
        return [found]
    is_class = isinstance(owner, type)
    try:
        return [type(found).__get__(found, None if is_class else owner, owner if is_class else type(owner))]
    except AttributeError:
        # A slot that holds nothing yet.
        return []


def getters(thing, name):
    """Returns what of the user's Python would call for an object's attribute, with the object as first argument."""
    found, binds, owner = _looked_up(thing, name)
    missing = ["__getattr__"] if found is _MISSING else []
    methods = (class_attribute(type(owner), each) for each in ("__getattribute__", *missing))
    return [types.MethodType(each, owner) for each in methods if _is_users_function(each)] + _code_of(
        found, binds, owner
    )


def setters(thing, name):
    """Returns what Python would call if an object's attribute were set, with the object as first argument."""
    found = class_attribute(type(thing), name)
    if isinstance(found, property) and found.fset is not None:
        return [types.MethodType(found.fset, thing)]
    method = class_attribute(type(found), "__set__")
    return [functools.partial(method, found, thing)] if _is_users_function(method) else []


def _looked_up(thing, name):
    """Returns what stands for the name, whether Python would bind it, since a class has it, and the object."""
    if isinstance(thing, super):
        owner = thing.__self__
        mro = (owner if isinstance(owner, type) else type(owner)).__mro__
        later = mro[mro.index(thing.__thisclass__) + 1 :]
        return next((vars(cls)[name] for cls in later if name in vars(cls)), _MISSING), True, owner
    is_class = isinstance(thing, type)
    if is_platforms(thing if isinstance(thing, (type, types.ModuleType)) else type(thing)):
        return getattr(thing, name, _MISSING), False, thing
    found = attribute(thing, name, _MISSING)
    if found is _MISSING and isinstance(thing, nn.Cell):
        registers = (instance_dict(thing).get(each, {}) for each in _REGISTERS)
        return next((its[name] for its in registers if name in its), _MISSING), False, thing
    return found, is_class or found is class_attribute(type(thing), name), thing


def _code_of(found, binds, owner):
    """Returns the user's code that computes an attribute."""
    if not binds or isinstance(owner, type):
        return []
    function = getattr(found, "fget" if isinstance(found, property) else "func", None)
    if isinstance(found, (property, functools.cached_property)):
        return [types.MethodType(function, owner)] if _is_users_function(function) else []
    method = class_attribute(type(found), "__get__")
    return [functools.partial(method, found, owner, type(owner))] if _is_users_function(method) else []


def _is_users_function(thing):
    return isinstance(thing, types.FunctionType) and not is_platforms(thing)
