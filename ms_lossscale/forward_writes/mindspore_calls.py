"""Calls of MindSpore's own functions, primitives and maps."""

import types

from mindspore import nn, ops
from mindspore.ops.primitive import Primitive

from ms_lossscale.forward_writes.mindspore_cells import is_of_mindspore
from ms_lossscale.forward_writes.mindspore_internals import (
    inputs_of_primitive,
    mapped_function,
    registered_functions,
)
from ms_lossscale.forward_writes.tensors import shares_memory, written_by_batch_norm
from ms_lossscale.forward_writes.values import NOTHING, Closure, Made, Partial, Values, flat, is_state, union

_QUERIES_OF_CELLS = (
    *("get_parameters", "trainable_params", "untrainable_params", "parameters_dict", "parameters_and_names"),
    *("named_parameters", "buffers", "named_buffers", "cells", "cells_and_names", "name_cells"),
)
# The position of the argument without which a primitive does not write what it declares.
_WRITES_ONLY_WITH = {"Embedding": 3, "FusedEmbedding": 3}
_FUNCTIONS = (types.FunctionType, types.MethodType, Closure, Partial, Made, nn.Cell, Primitive)
# More than a function has that is passed to one of MindSpore's, as a loop's body say.
_ARGUMENTS = 8


class MindSporeCalls:
    """
    Args:
        reader (Reader): The other parts.
    """

    def __init__(self, reader):
        self._reader = reader

    def call_function(self, function, args, kwargs, bound=()):
        """What a function of MindSpore may return. It is followed if it is given something that it could write."""
        name = getattr(function, "__name__", "")
        functions, state = _functions_and_state(args, kwargs)
        if functions:
            self._run(functions, NOTHING)  # What else a gradient is given, the weights say, is no input.
            return functions
        if not state:
            return NOTHING
        if shares_memory(name):
            return args[0] if args else NOTHING
        if name.startswith("batch_norm"):
            self._write(union(written_by_batch_norm(args, kwargs)))
            return NOTHING
        if isinstance(function, types.FunctionType):
            return self._reader.functions.call(function, [*bound, *args], kwargs)
        return NOTHING

    def _run(self, functions, inputs):
        """Those of the user's run within MindSpore's; where that returns them, they are called with more."""
        for function in functions.values():
            if isinstance(function, (Closure, Partial)) or not is_of_mindspore(function):
                self._reader.calls.call(function, [inputs] * _ARGUMENTS, {})

    def call_method_of_cell(self, function, cell, args, kwargs):
        name = function.__name__
        if name not in _QUERIES_OF_CELLS:
            return self.call_function(function, args, kwargs, [Values.of(cell)])
        found = getattr(cell, name)()
        return Values.of(found if isinstance(found, dict) else tuple(found))

    def call_object(self, thing, args, kwargs):
        """What a primitive, a map or an overloaded function may return."""
        if isinstance(thing, ops.MultitypeFuncGraph):
            return union([self._reader.calls.call(each, args, kwargs) for each in registered_functions(thing)])
        cls = thing.cls if isinstance(thing, Made) else type(thing)
        if issubclass(cls, Primitive):
            return self._call_primitive(cls, args, kwargs)
        inner = thing.args[:1] if isinstance(thing, Made) else [Values.of(*filter(None, [mapped_function(thing)]))]
        mapped = [*filter(None, inner), *args]
        for function in mapped[0].values():
            self._reader.calls.call(function, [flat(values) for values in mapped[1:]], kwargs)
        return NOTHING

    def _call_primitive(self, cls, args, kwargs):
        name = cls.__name__
        if name == "Partial":
            return self.partials(args)
        self._run(*_functions_and_state(args, kwargs))
        if name == "Custom":
            for values in (*args, *kwargs.values()):
                self._reader.findings.doubt(values, "it is passed to an ops.Custom")
        needed = args[_WRITES_ONLY_WITH[name] :][:1] if name in _WRITES_ONLY_WITH else [Values.of(cls)]
        if any(thing is not None for values in needed for thing in values.values()):
            inputs = inputs_of_primitive(cls)
            for values, (_, writes) in zip(args, inputs):
                self._write(values if writes else NOTHING)
            for argument, writes in inputs:
                self._write(kwargs.get(argument, NOTHING) if writes else NOTHING)
        return args[0] if args and shares_memory(name) else NOTHING

    def _write(self, values):
        self._reader.findings.write_all(flat(values).values())

    def partials(self, args):
        return Values.of(*(Partial(function, args[1:]) for function in args[0].values()))


def _functions_and_state(args, kwargs):
    given = flat(union([*args, *kwargs.values()])).items()
    functions = Values((key, thing) for key, thing in given if _is_function(thing))
    return functions, Values((key, thing) for key, thing in given if is_state(thing))


def _is_function(thing):
    return isinstance(thing, _FUNCTIONS) or (isinstance(thing, type) and issubclass(thing, Primitive))
