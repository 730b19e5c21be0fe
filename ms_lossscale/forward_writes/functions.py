"""Runs through a function's source with what its arguments may be."""

import ast
import types

from ms_lossscale.forward_writes.frame import Frame
from ms_lossscale.forward_writes.mindspore_cells import is_of_mindspore
from ms_lossscale.forward_writes.source import tree_of
from ms_lossscale.forward_writes.values import NOTHING, Many, Row, Values, union

# Far more than any cell needs; what reaches it multiplies without end.
_MAX_FUNCTIONS_OF_A_CELL = 5000
# MindSpore raises Python's own limit beyond what the stack of an older Python holds.
_MAX_DEPTH = 100


class CannotFollow(Exception):
    """Source of a kind that is not followed."""


class Functions:
    """
    Args:
        reader (Reader): The other parts.
    """

    def __init__(self, reader):
        self._reader = reader
        self._depth = 0
        self.renew_budget()
        self.forget()

    def renew_budget(self):
        self._budget = _MAX_FUNCTIONS_OF_A_CELL

    def forget(self):
        """Drops what calls returned, since one of them was broken off."""
        self._calls, self._open_closures = {}, set()

    def call(self, function, args, kwargs):
        """What a plain function may return. A second call with the same arguments writes nothing new."""
        key = (function, tuple(map(frozenset, args)), frozenset((name, frozenset(v)) for name, v in kwargs.items()))
        if key not in self._calls:
            # The arguments are kept, since the key has the identities of what they hold.
            self._calls[key] = NOTHING, args, kwargs
            self._calls[key] = self._call(function, args, kwargs), args, kwargs
        return self._calls[key][0]

    def call_with_unknown_inputs(self, function, args):
        """The same where what comes after the arguments may be anything, so that defaults say nothing."""
        node = self._node_of(function)
        if node is None:
            return self._unreadable(function, args)
        frame = Frame(function)
        for name in _names(node.args):
            frame.assign(name, NOTHING)
        _bind(frame, node.args, args, {})
        return self._run(frame, node)

    def call_closure(self, closure, args, kwargs):
        """What it may return. The names around it may have changed since the last time."""
        if closure.key in self._open_closures:
            return NOTHING
        self._open_closures.add(closure.key)
        frame, parameters = Frame(closure.frame.function, closure.frame), closure.node.args
        evaluate = self._reader.expressions.evaluate
        _bind_defaults(frame, parameters, [evaluate(default, closure.frame) for default in parameters.defaults], {})
        _bind(frame, parameters, args, kwargs)
        returned = self._run(frame, closure.node)
        self._open_closures.discard(closure.key)
        return returned

    def _call(self, function, args, kwargs):
        node = self._node_of(function)
        if node is None:
            return self._unreadable(function, [*args, *kwargs.values()])
        frame = Frame(function)
        keywords = {name: Values.of(default) for name, default in (function.__kwdefaults__ or {}).items()}
        _bind_defaults(frame, node.args, [Values.of(default) for default in function.__defaults__ or ()], keywords)
        _bind(frame, node.args, args, kwargs)
        return self._run(frame, node)

    def _node_of(self, function):
        return tree_of(function.__code__) if isinstance(function, types.FunctionType) else None

    def _unreadable(self, function, args):
        if is_of_mindspore(function):
            return NOTHING
        held = [Values.of(cell.cell_contents) for cell in getattr(function, "__closure__", None) or ()]
        name = getattr(function, "__qualname__", repr(function))
        self._reader.findings.doubt(union([*args, *held]), f"the source of '{name}' can't be read")
        return NOTHING

    def _run(self, frame, node):
        self._budget -= 1
        if self._budget < 0:
            raise CannotFollow("it calls too many functions")
        if self._depth == _MAX_DEPTH:
            raise CannotFollow("its calls are nested too deep")
        self._depth += 1
        try:
            return self._returned_by(frame, node)
        finally:
            self._depth -= 1

    def _returned_by(self, frame, node):
        if isinstance(node, ast.Lambda):
            return self._reader.expressions.evaluate(node.body, frame)
        self._reader.statements.execute(node.body, frame)
        return frame.returned


def _names(parameters):
    return [argument.arg for argument in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)]


def _positional(parameters):
    return [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]


def _bind_defaults(frame, parameters, defaults, keywords):
    names = _positional(parameters)
    for name, values in (*zip(names[len(names) - len(defaults) :], defaults), *keywords.items()):
        frame.assign(name, values)


def _bind(frame, parameters, args, kwargs):
    positional, names = _positional(parameters), set(_names(parameters))
    for name, values in zip(positional, args):
        frame.assign(name, values)
    if parameters.vararg:
        frame.assign(parameters.vararg.arg, Values.of(Row(args[len(positional) :])))
    for name in names & set(kwargs):
        frame.assign(name, kwargs[name])
    if parameters.kwarg:
        others = union(values for name, values in kwargs.items() if name not in names)
        frame.assign(parameters.kwarg.arg, Values.of(Many(others)))
    if "**" in kwargs:
        for name in names - set(kwargs) - set(positional[: len(args)]):
            frame.add(name, kwargs["**"])
