"""Finds the functions that a forward or a backward calls without naming them."""

import types

from mindspore import Tensor, nn

from ms_lossscale.forward_state.attributes import found_as
from ms_lossscale.forward_state.ownership import is_users, users_classes
from ms_lossscale.forward_state.static import class_dict
from ms_lossscale.forward_state.values import Partial, of

_NOT_OF_A_FORWARD = ("__init__", "__new__", "__init_subclass__", "__repr__", "__str__")


def entries(things):
    """Returns the functions of objects that a forward or a backward calls without naming them."""
    objects = {}
    for thing in things:
        if users_classes(type(thing)):
            objects.setdefault(type(thing), []).append(thing)
    # Once for all objects of a class, since a function's parameters stand for all that it may be called with.
    methods = ((_methods_of_python(cls), [of(*its)]) for cls, its in objects.items())
    return [
        *(hook for thing in things for hook in _hooks(thing)),
        *(Partial(method, its) for of_class, its in methods for method in of_class),
    ]


def _hooks(thing):
    if isinstance(thing, Tensor):
        yield from getattr(thing, "hooks", tuple)()
    if isinstance(thing, nn.Cell):
        hooks = (thing._forward_pre_hook, thing._forward_hook, thing._backward_pre_hook, thing._backward_hook)
        yield from (hook for each in hooks if isinstance(each, dict) for hook in each.values())
        methods = [*found_as(thing, "construct"), *found_as(thing, "bprop")]
        yield from filter(lambda each: is_users(inner_function(each)), methods)


def _methods_of_python(cls):
    """Returns the methods that Python calls for operators, loops and the like."""
    methods = ((name, method) for base in users_classes(cls) for name, method in class_dict(base).items())
    return [
        method
        for name, method in methods
        if name.startswith("__") and name not in _NOT_OF_A_FORWARD and type(method) is types.FunctionType
    ]


def inner_function(method):
    function = getattr(method, "__func__", getattr(method, "func", method))
    return getattr(function, "__wrapped__", function)
