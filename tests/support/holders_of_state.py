"""
Holders of Python's, NumPy's and MindSpore's in which state may be kept.

Each of HOLDERS is called with a state, and returns an object through which the code of a forward can get at it. Any
holder may be the state of another one.
"""

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
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


def frozen(state):
    return frozenset([having(state)])


HOLDERS = {
    # Containers of Python's
    "list": lambda state: [state],
    "tuple": lambda state: (0, state),
    "dict": lambda state: {"a": state},
    "key of a dict": lambda state: {having(state): 0},
    "set": lambda state: {having(state)},
    "deque": lambda state: collections.deque([state]),
    "defaultdict": lambda state: collections.defaultdict(int, a=state),
    "UserList": lambda state: collections.UserList([state]),
    "dict of lists": lambda state: {"a": [(state,)]},
    "SimpleNamespace": lambda state: types.SimpleNamespace(u=state),
    "Queue": lambda state: filled(queue.Queue(), state),
    "namedtuple": Named,
    "dataclass": Data,
    "enum": lambda state: enum.Enum("Enum", {"A": [state]}).A,
    # Attributes
    "attribute": lambda state: given(subclass()(), state),
    "attribute of a list": lambda state: given(subclass(list)(), state),
    "element of an own list": lambda state: subclass(list)([state]),
    "attribute of an array": lambda state: given(np.zeros(2).view(subclass(np.ndarray)), state),
    "attribute of a function": lambda state: given(lambda: None, state),
    "attribute of a Parameter": lambda state: given(Parameter(Tensor(0.0), name="with an attribute"), state),
    "attribute of a Tensor": lambda state: given(Tensor(0.0), state),
    "slot": lambda state: given(subclass(__slots__=("u",))(), state),
    "mangled slot": MangledSlot,
    "attribute of a class": lambda state: subclass(u=state),
    "attribute of an object's class": lambda state: subclass(u=state)(),
    "descriptor": lambda state: (owner := having(0), subclass(of=Descriptor(owner, state))()),
    "an object that refuses": lambda state: given(Refusing(), state),
    "an object whose class refuses": lambda state: given(object.__new__(Refused), state),
    "beside a weak proxy of nothing": lambda state: [weakref.proxy(subclass()()), state],
    # Weak references
    "weakref": lambda state: weakref.ref(having(state)),
    "weak proxy": lambda state: weakref.proxy(having(state)),
    "WeakValueDictionary": lambda state: weakref.WeakValueDictionary(a=having(state)),
    "WeakKeyDictionary": lambda state: weakref.WeakKeyDictionary({having(0): state}),
    # Threads and contexts
    "threading.local": lambda state: given(threading.local(), state),
    "ContextVar": in_context,
    "Context": lambda state: (context := contextvars.Context(), context.run(in_context, state))[0],
    "ExitStack": exit_stack,
    # Functions
    "closure": closure,
    "default": default,
    "wrapped function": wrapped,
    "single dispatch": single_dispatch,
    "method": lambda state: local_class(state).method,
    "bound method of a list": lambda state: [state].__getitem__,
    "function of a local class": local_class,
    "staticmethod": lambda state: staticmethod(closure(state)),
    "getter": lambda state: Computing(fget=closure(state)),
    "partial": lambda state: functools.partial(print, state),
    "keyword of a partial": lambda state: functools.partial(print, end=state),
    "cached_property": lambda state: subclass(of=functools.cached_property(closure(state)))(),
    "result of a cached function": cached,
    # Iterators
    "iterator of a list": lambda state: iter([state]),
    "cycle": lambda state: itertools.cycle([state]),
    "chain": lambda state: itertools.chain([], [state]),
    "map": lambda state: map(print, [state]),
    "generator that has begun": generator,
    # NumPy and MindSpore
    "object array": object_array,
    "Cell": Layer,
    "CellList": lambda state: nn.CellList([Layer(state)]),
    "hook of a Cell": lambda state: (cell := nn.ReLU(), cell.register_forward_hook(closure(state)))[0],
    "Model": lambda state: mindspore.Model(Layer(state)),
    "jit": lambda state: mindspore.jit(closure(state)),
    "grad": lambda state: mindspore.grad(closure(state)),
    "vmap": lambda state: mindspore.vmap(closure(state)),
    "MultitypeFuncGraph": lambda state: (
        graph := ops.MultitypeFuncGraph("f"),
        graph.register("Tensor")(closure(state)),
    )[0],
    "attribute of a Primitive": lambda state: given(ops.ReLU(), state),
}
