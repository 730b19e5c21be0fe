"""What a call may return, and what it writes."""

import ast
import functools
import types

from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import Primitive

from ms_lossscale.forward_writes.builtin_calls import (
    call_builtin,
    call_builtin_class,
    call_method_of_container,
    is_builtin,
)
from ms_lossscale.forward_writes.mindspore_calls import MindSporeCalls
from ms_lossscale.forward_writes.mindspore_cells import is_of_mindspore
from ms_lossscale.forward_writes.source import unwrapped
from ms_lossscale.forward_writes.tensors import shares_memory, writes_its_tensor
from ms_lossscale.forward_writes.values import (
    NOTHING,
    Closure,
    Made,
    Many,
    Parent,
    Partial,
    Row,
    TensorMethod,
    Text,
    Values,
    elements,
    union,
)

# How many arguments `*args` may stand for where their number is not known.
_STARRED = 8
_OPERATORS = (Primitive, ops.HyperMap, ops.Map)
_MUTATORS = ("append", "extend", "insert", "add", "update")


class Calls:
    """
    Args:
        reader (Reader): The other parts.
    """

    def __init__(self, reader):
        self._reader = reader
        self._of_mindspore = MindSporeCalls(reader)

    def read(self, node, frame):
        """A call in the source."""
        args, kwargs = self._arguments(node, frame)
        evaluate, func = self._reader.expressions.evaluate, node.func
        if not isinstance(func, ast.Attribute):
            functions = evaluate(func, frame)
            if not functions and not is_of_mindspore(frame.function):
                self._doubt(args, kwargs, ast.unparse(func))
            return self._call_each(functions, args, kwargs, frame)
        receiver = evaluate(func.value, frame)
        if func.attr in _MUTATORS:
            frame.grow(func.value, elements(Values.of(Row(args))))
        functions = self._reader.expressions.attribute(receiver, func.attr)
        made = [thing for thing in receiver.values() if isinstance(thing, (Row, Many, Text))]
        # A method of a plain tensor, or of a container, writes none of its arguments.
        if receiver and not functions and not made and not is_of_mindspore(frame.function):
            self._doubt(args, kwargs, ast.unparse(func))
        called = [call_method_of_container(thing, func.attr) for thing in made]
        return union([*called, self._call_each(functions, args, kwargs, frame)]) if functions or made else NOTHING

    def _call_each(self, functions, args, kwargs, frame):
        if any(function is super for function in functions.values()):
            return _parents(args, frame)
        return union([self.call(function, args, kwargs) for function in functions.values()])

    def _arguments(self, node, frame):
        evaluate = self._reader.expressions.evaluate
        args = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args += _unpacked(evaluate(arg.value, frame))
            else:
                args.append(evaluate(arg, frame))
        kwargs = {keyword.arg: evaluate(keyword.value, frame) for keyword in node.keywords if keyword.arg}
        spread = [elements(evaluate(keyword.value, frame)) for keyword in node.keywords if not keyword.arg]
        return args, {**kwargs, "**": union(spread)} if spread else kwargs

    def call(self, function, args, kwargs):
        """What a call of an object may return."""
        if isinstance(function, TensorMethod):
            return self._call_method_of_tensor(function)
        if isinstance(function, Closure):
            return self._reader.functions.call_closure(function, args, kwargs)
        if isinstance(function, Partial):
            return self.call(function.function, [*function.args, *args], kwargs)
        if isinstance(function, functools.partial):
            keywords = {name: Values.of(value) for name, value in function.keywords.items()}
            return self.call(function.func, [*map(Values.of, function.args), *args], {**keywords, **kwargs})
        if isinstance(function, nn.Cell):
            return self._reader.cells.call(function, args, kwargs)
        if isinstance(function, (*_OPERATORS, ops.MultitypeFuncGraph)):
            return self._of_mindspore.call_object(function, args, kwargs)
        if isinstance(function, Made):
            return self._call_made(function, args, kwargs)
        if isinstance(function, type):
            return self._call_class(function, args, kwargs)
        if is_builtin(function):
            return call_builtin(function, args, self._reader)
        return self._call_function(function, args, kwargs)

    def _call_method_of_tensor(self, method):
        if writes_its_tensor(method.name):
            self._reader.findings.write_all([method.tensor])
            return Values.of(method.tensor)
        return Values.of(method.tensor) if shares_memory(method.name) else NOTHING

    def _call_class(self, cls, args, kwargs):
        if cls.__module__ == "builtins":
            return call_builtin_class(cls, args, kwargs, self)
        if cls is functools.partial:
            return self._of_mindspore.partials(args)
        if issubclass(cls, (tuple, Tensor)):
            return elements(union(args)) if issubclass(cls, tuple) else NOTHING
        if not is_of_mindspore(cls):
            self._doubt(args, kwargs, cls.__qualname__)
        return Values.of(Made(cls, args))

    def _call_made(self, thing, args, kwargs):
        if issubclass(thing.cls, _OPERATORS):
            return self._of_mindspore.call_object(thing, args, kwargs)
        methods = self._reader.expressions.attribute(
            Values.of(thing), "construct" if issubclass(thing.cls, nn.Cell) else "__call__"
        )
        return union([self.call(method, args, kwargs) for method in methods.values()])

    def _call_function(self, function, args, kwargs):
        function, owner = unwrapped(function)
        if isinstance(owner, nn.Cell) and is_of_mindspore(function):
            return self._of_mindspore.call_method_of_cell(function, owner, args, kwargs)
        args = args if owner is None else [Values.of(owner), *args]
        if is_of_mindspore(function):
            return self._of_mindspore.call_function(function, args, kwargs)
        if isinstance(function, types.FunctionType):
            return self._reader.functions.call(function, args, kwargs)
        own_call = type(function).__call__ if callable(function) else None
        if isinstance(own_call, types.FunctionType):
            return self._reader.functions.call(own_call, [Values.of(function), *args], kwargs)
        self._doubt(args, kwargs, getattr(function, "__name__", repr(function)))
        return NOTHING

    def _doubt(self, args, kwargs, name):
        for values in (*args, *kwargs.values()):
            self._reader.findings.doubt(values, f"it is passed to '{name}', which can't be followed")


def _unpacked(values):
    """The arguments that `*values` stands for."""
    if len(values) == 1 and isinstance(next(iter(values.values())), Row):
        return next(iter(values.values())).positions
    return [elements(values)] * _STARRED


def _parents(args, frame):
    """What `super()` is."""
    first = frame.function.__code__.co_varnames[:1]
    classes, owners = args if args else (frame.read("__class__"), frame.read(*first))
    return Values.of(
        *(
            Parent(type(owner).__mro__[type(owner).__mro__.index(cls) + 1], owner)
            for cls in classes.values()
            for owner in owners.values()
            if cls in type(owner).__mro__
        )
    )
