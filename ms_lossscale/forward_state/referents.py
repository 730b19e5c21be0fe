"""Finds what an object refers to, with Python's garbage collector as the model. Nothing of the user's is executed."""

import collections
import contextvars
import gc
import logging
import re
import threading
import types
import weakref

import numpy as np
from mindspore import Tensor, nn

from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale.forward_state.ownership import is_ours, is_users_namespace, users_classes
from ms_lossscale.forward_state.static import class_dict, instance_dict

SEQUENCES = (list, tuple, set, frozenset, collections.deque)
CONTAINERS = (*SEQUENCES, dict)
LEAVES = (str, bytes, int, float, complex, type(None), type(Ellipsis))
# They do not lead to state. A traceback knows all that was known where it was raised, an ABC what was asked of it.
_LEAF_TYPES = frozenset(
    (
        *(*LEAVES, bool, bytearray, range, np.dtype, re.Pattern, types.CodeType, types.TracebackType),
        *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, type(threading.Lock()), type(threading.RLock())),
        type(vars(collections.abc.Mapping)["_abc_impl"]),
    )
)
_MAY_BE_EMPTY = frozenset((*CONTAINERS, collections.OrderedDict))
# A skipped step must change the state of a loss scale, and that of the step itself, which a function may reach.
# A logger leads to all others, and to what they have logged.
_NOT_ENTERED = (np.generic, FixedAttributes, logging.Logger)
# What MindSpore itself keeps of a Parameter: its first value, and the optimizer's state.
_OF_PARAMETER = ("init_mode", "_inited_param", "_param_info")


def may_lead_on(thing):
    """Returns whether an object may be state or refer to any."""
    kind = type(thing)
    if kind in _LEAF_TYPES or issubclass(kind, _NOT_ENTERED):
        return False
    return kind not in _MAY_BE_EMPTY or len(thing) > 0


def referents(thing):
    """Returns what an object refers to, apart from what functions and modules know by name."""
    kind = type(thing)
    if issubclass(kind, type):
        return _of_class(thing)
    if kind is types.FunctionType:
        return _of_function(thing)
    if kind is types.FrameType:
        return [each for each in gc.get_referents(thing) if each is not thing.f_globals and each is not thing.f_back]
    if kind is dict:
        return _of_dict(thing)
    if kind in SEQUENCES:
        return thing
    # Not by `issubclass`, since Tensor asks a class for its attributes.
    if type.__subclasscheck__(Tensor, kind):
        hooks = getattr(thing, "hooks", tuple)()
        return [*hooks, *(value for name, value in instance_dict(thing).items() if name not in _OF_PARAMETER)]
    if issubclass(kind, types.ModuleType) or (is_ours(kind) and not issubclass(kind, nn.Cell)):
        return ()
    attributes = instance_dict(thing)
    others = [each for each in gc.get_referents(thing) if each is not attributes]
    return [*attributes.values(), *users_classes(kind), *_of_kind(thing), *others]


def _of_class(cls):
    users = users_classes(cls)
    return [*class_dict(cls).values(), *users, type(cls)] if cls in users else ()


def _of_function(function):
    return [
        *(held for cell in function.__closure__ or () for held in gc.get_referents(cell)),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        *vars(function).values(),
    ]


def _of_dict(thing):
    is_namespace = "__name__" in thing and "__builtins__" in thing
    return () if is_namespace and not is_users_namespace(thing) else [*thing.values(), *thing]


def contents(thing):
    """Returns the elements or values of a container, whatever its class does of its own."""
    container = next(each for each in (*SEQUENCES, collections.OrderedDict, dict) if issubclass(type(thing), each))
    return list((container.values if issubclass(container, dict) else container.__iter__)(thing))


def _of_kind(thing):
    """Returns what the garbage collector does not know, or knows in another order."""
    kind = type(thing)
    if issubclass(kind, CONTAINERS):
        return contents(thing)
    if issubclass(kind, np.ndarray) and thing.dtype.hasobject:
        return [np.ndarray.tolist(thing)]
    if issubclass(kind, weakref.ref):
        return [weakref.ref.__call__(thing)]
    if kind in weakref.ProxyTypes:
        return behind(thing)
    if kind is contextvars.ContextVar:
        return [thing.get(None)]
    return [thing.gi_frame] if kind is types.GeneratorType else ()


def behind(proxy):
    """Returns a list of the object of a weak proxy, empty if there is none any more."""
    try:
        # A proxy shows nothing but the other object. This method of it is Python's.
        return [proxy.__reduce_ex__.__self__]
    except ReferenceError:
        return []
