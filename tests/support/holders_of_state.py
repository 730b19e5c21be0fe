"""
Holders of Python's, NumPy's and MindSpore's in which state may be kept.

Each of HOLDERS is called with a state, and returns an object through which the code of a forward can get at it. Any
holder may be the state of another one.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import contextvars
import ctypes
import dataclasses
import enum
import functools
import itertools
import operator
import queue
import threading
import types
import weakref
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

# What is otherwise referred to by weak references only.
KEPT = []


def kept(thing):
    KEPT.append(thing)
    return thing


def given(thing, state, name="u"):
    """Gives an object an attribute."""
    (threading.local if issubclass(type(thing), threading.local) else object).__setattr__(thing, name, state)
    return thing


def having(state):
    """Returns an object that can be referred to weakly, and is a key."""
    return kept(given(type("Key", (), {})(), state))


def subclass(*bases, **attributes):
    return type("Own", bases, attributes)


class SlottedByAText:
    __slots__ = "names"


class MangledSlot:
    __slots__ = ("__u",)

    def __init__(self, state):
        self.__u = state


@dataclasses.dataclass(frozen=True)
class Data:
    u: Any


class Named(NamedTuple):
    u: Any


class Refusing:
    """Raises if any of its code is run."""

    def refuse(self, *_):
        raise AssertionError("code of the user's was run")

    __getattribute__ = __getattr__ = __dir__ = __iter__ = __len__ = __eq__ = __repr__ = __bool__ = __call__ = refuse
    __hash__ = None
    __dict__ = __class__ = __module__ = property(refuse)


class RefusingMeta(type):
    def refuse(cls, *_):
        raise AssertionError("code of the user's was run")

    __getattribute__ = __getattr__ = __instancecheck__ = __subclasscheck__ = __call__ = refuse
    __dict__ = __mro__ = __module__ = property(refuse)


class Refused(Refusing, metaclass=RefusingMeta):
    pass


class Computing:
    """Has a property of which one function knows the state."""

    def __init__(self, **functions):
        self.made = subclass(computed=property(**functions))()


class Descriptor:
    """Keeps the state of each owner itself."""

    def __init__(self, owner, state):
        self.all = weakref.WeakKeyDictionary({owner: state})

    def __get__(self, owner, cls):
        raise AssertionError("code of the user's was run")


class Layer(nn.Cell):
    """Keeps the state unseen by MindSpore."""

    def __init__(self, state):
        super().__init__()
        self.keeps = [state]


def generator(state):
    """Returns a generator that has begun, and knows the state."""

    def iterate():
        known = state
        yield
        yield known

    iterator = iterate()
    next(iterator)
    return iterator


def exit_stack(state):
    stack = contextlib.ExitStack()
    stack.callback(print, state)
    return stack


def future(state):
    made = concurrent.futures.Future()
    made.set_result(state)
    return made


def filled(container, state):
    container.put(state)
    return container


def in_context(state):
    variable = contextvars.ContextVar("variable")
    variable.set(state)
    return variable


def cached(state):
    """Returns a function with a cache, which alone knows what it returned."""
    results = [state]
    function = functools.lru_cache(lambda: results.pop())
    function()
    return function


def closure(state):
    return lambda: state


def default(state):
    return lambda _=state: None


def keyword_default(state):
    return lambda *, _=state: None


def wrapped(state):
    return functools.wraps(closure(state))(lambda: None)


def single_dispatch(state):
    function = functools.singledispatch(lambda _: None)
    function.register(int, closure(state))
    return function


def local_class(state):
    class Local:
        def method(self):
            return state

    return Local()


def object_array(state):
    array = np.empty((2, 2), object)
    array[1, 0] = state
    return array


def structured_array(state):
    array = np.zeros(2, [("number", int), ("thing", object)])
    array["thing"][1] = state
    return array


def frozen(state):
    return frozenset([having(state)])


HOLDERS = {
    # Containers of Python's
    "list": lambda state: [state],
    "tuple": lambda state: (0, state),
    "dict": lambda state: {"a": state},
    "key of a dict": lambda state: {having(state): 0},
    "set": lambda state: {having(state)},
    "frozenset": frozen,
    "deque": lambda state: collections.deque([state]),
    "OrderedDict": lambda state: collections.OrderedDict(a=state),
    "defaultdict": lambda state: collections.defaultdict(int, a=state),
    "factory of a defaultdict": lambda state: collections.defaultdict(closure(state)),
    "ChainMap": lambda state: collections.ChainMap({}, {"a": state}),
    "UserDict": lambda state: collections.UserDict(a=state),
    "UserList": lambda state: collections.UserList([state]),
    "mappingproxy": lambda state: types.MappingProxyType({"a": state}),
    "values of a dict": lambda state: {"a": state}.values(),
    "items of a dict": lambda state: {"a": state}.items(),
    "dict of lists": lambda state: {"a": [(state,)]},
    "SimpleNamespace": lambda state: types.SimpleNamespace(u=state),
    "argparse.Namespace": lambda state: argparse.Namespace(u=state),
    "Queue": lambda state: filled(queue.Queue(), state),
    "SimpleQueue": lambda state: filled(queue.SimpleQueue(), state),
    "PriorityQueue": lambda state: filled(queue.PriorityQueue(), (0, state)),
    "namedtuple": Named,
    "dataclass": Data,
    "enum": lambda state: enum.Enum("Enum", {"A": [state]}).A,
    # Attributes
    "attribute": lambda state: given(subclass()(), state),
    "attribute of a list": lambda state: given(subclass(list)(), state),
    "element of an own list": lambda state: subclass(list)([state]),
    "attribute of a dict": lambda state: given(subclass(dict)(), state),
    "value of an own dict": lambda state: subclass(dict)(a=state),
    "attribute of a set": lambda state: given(subclass(set)(), state),
    "attribute of a number": lambda state: given(subclass(complex)(), state),
    "attribute of a text": lambda state: given(subclass(str)(), state),
    "attribute of an array": lambda state: given(np.zeros(2).view(subclass(np.ndarray)), state),
    "attribute of an exception": lambda state: given(ValueError(), state),
    "argument of an exception": lambda state: ValueError(state),
    "attribute of a function": lambda state: given(lambda: None, state),
    "attribute of a partial": lambda state: given(functools.partial(print), state),
    "attribute of a Parameter": lambda state: given(Parameter(Tensor(0.0), name="with an attribute"), state),
    "attribute of a Tensor": lambda state: given(Tensor(0.0), state),
    "slot": lambda state: given(subclass(__slots__=("u",))(), state),
    "slot of a base": lambda state: given(subclass(subclass(__slots__=("u",)), __slots__=())(), state),
    "slot by a text": lambda state: given(SlottedByAText(), state, "names"),
    "mangled slot": MangledSlot,
    "attribute of a class": lambda state: subclass(u=state),
    "attribute of an object's class": lambda state: subclass(u=state)(),
    "attribute of a base": lambda state: subclass(subclass(u=state)),
    "attribute of a metaclass": lambda state: subclass(type, u=state)("Own", (), {}),
    "descriptor": lambda state: (owner := having(0), subclass(of=Descriptor(owner, state))()),
    "an object that refuses": lambda state: given(Refusing(), state),
    "an object whose class refuses": lambda state: given(object.__new__(Refused), state),
    "beside a weak proxy of nothing": lambda state: [weakref.proxy(subclass()()), state],
    # Weak references
    "weakref": lambda state: weakref.ref(having(state)),
    "own weakref": lambda state: subclass(weakref.ref)(having(state)),
    "weak proxy": lambda state: weakref.proxy(having(state)),
    "WeakMethod": lambda state: weakref.WeakMethod(kept(local_class(state)).method),
    "WeakSet": lambda state: weakref.WeakSet([having(state)]),
    "WeakValueDictionary": lambda state: weakref.WeakValueDictionary(a=having(state)),
    "WeakKeyDictionary": lambda state: weakref.WeakKeyDictionary({having(0): state}),
    # Threads and contexts
    "threading.local": lambda state: given(threading.local(), state),
    "own threading.local": lambda state: given(subclass(threading.local)(), state),
    "ContextVar": in_context,
    "default of a ContextVar": lambda state: contextvars.ContextVar("variable", default=state),
    "Context": lambda state: (context := contextvars.Context(), context.run(in_context, state))[0],
    "Future": future,
    "ExitStack": exit_stack,
    "py_object": ctypes.py_object,
    # Functions
    "closure": closure,
    "default": default,
    "keyword default": keyword_default,
    "wrapped function": wrapped,
    "single dispatch": single_dispatch,
    "method": lambda state: local_class(state).method,
    "bound method of a list": lambda state: [state].__getitem__,
    "bound method of an OrderedDict": lambda state: collections.OrderedDict(a=state).get,
    "function of a local class": local_class,
    "staticmethod": lambda state: staticmethod(closure(state)),
    "classmethod": lambda state: subclass(of=classmethod(closure(state))),
    "getter": lambda state: Computing(fget=closure(state)),
    "setter": lambda state: Computing(fset=closure(state)),
    "deleter": lambda state: Computing(fdel=closure(state)),
    "partial": lambda state: functools.partial(print, state),
    "keyword of a partial": lambda state: functools.partial(print, end=state),
    "partialmethod": lambda state: subclass(of=functools.partialmethod(print, state))(),
    "cached_property": lambda state: subclass(of=functools.cached_property(closure(state)))(),
    "cached function": lambda state: functools.lru_cache(closure(state)),
    "result of a cached function": cached,
    "itemgetter": lambda state: operator.itemgetter(having(state)),
    # Iterators
    "iterator of a list": lambda state: iter([state]),
    "iterator of a dict": lambda state: iter({"a": state}.values()),
    "reversed": lambda state: reversed([state]),
    "cycle": lambda state: itertools.cycle([state]),
    "cycle that has begun": lambda state: (cycle := itertools.cycle([state, 0]), next(cycle))[0],
    "repeat": itertools.repeat,
    "chain": lambda state: itertools.chain([], [state]),
    "map": lambda state: map(print, [state]),
    "function of a map": lambda state: map(closure(state), []),
    "filter": lambda state: filter(None, [state]),
    "zip": lambda state: zip([state]),
    "enumerate": lambda state: enumerate([state]),
    "generator that has begun": generator,
    "generator expression": lambda state: (each for each in [state]),
    # NumPy and MindSpore
    "object array": object_array,
    "structured array": structured_array,
    "Cell": Layer,
    "CellList": lambda state: nn.CellList([Layer(state)]),
    "hook of a Cell": lambda state: (cell := nn.ReLU(), cell.register_forward_hook(closure(state)))[0],
    "Model": lambda state: mindspore.Model(Layer(state)),
    "jit": lambda state: mindspore.jit(closure(state)),
    "grad": lambda state: mindspore.grad(closure(state)),
    "value_and_grad": lambda state: mindspore.value_and_grad(closure(state)),
    "vmap": lambda state: mindspore.vmap(closure(state)),
    "MultitypeFuncGraph": lambda state: (
        graph := ops.MultitypeFuncGraph("f"),
        graph.register("Tensor")(closure(state)),
    )[0],
    "attribute of a Primitive": lambda state: given(ops.ReLU(), state),
}
