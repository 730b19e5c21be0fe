"""Finds the functions that a forward or a backward calls without naming them."""

import types

from mindspore import Tensor, nn

from ms_lossscale.forward_state.attributes import found_as
from ms_lossscale.forward_state.ownership import is_users

_NOT_OF_A_FORWARD = ("__init__", "__new__", "__init_subclass__", "__repr__", "__str__")


def entries(thing):
    """Yields the functions of an object that a forward or a backward calls without naming them."""
    if isinstance(thing, Tensor):
        yield from getattr(thing, "hooks", tuple)()
    if isinstance(thing, nn.Cell):
        hooks = (thing._forward_pre_hook, thing._forward_hook, thing._backward_pre_hook, thing._backward_hook)
        yield from (hook for each in hooks if isinstance(each, dict) for hook in each.values())
        methods = [*found_as(thing, "construct"), *found_as(thing, "bprop")]
        yield from filter(lambda each: is_users(inner_function(each)), methods)
    for cls in type(thing).__mro__ if is_users(type(thing)) else ():
        for name, method in vars(cls).items():
            if isinstance(method, types.FunctionType) and is_users(method) and name not in _NOT_OF_A_FORWARD:
                yield from [types.MethodType(method, thing)] if name.startswith("__") else []


def inner_function(method):
    function = getattr(method, "__func__", getattr(method, "func", method))
    return getattr(function, "__wrapped__", function)
