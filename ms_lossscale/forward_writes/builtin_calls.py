"""Python's own functions, and the methods of containers and strings."""

import types

from ms_lossscale.forward_writes.expressions import formatted
from ms_lossscale.forward_writes.values import NOTHING, Many, Row, Values, elements, is_container, union

_CONTAINERS = (list, tuple, set, frozenset, dict, reversed)


def is_builtin(function):
    """Whether it is a function of Python's own, or a method of a container or a string."""
    if not isinstance(function, types.BuiltinFunctionType):
        return False
    owner = function.__self__
    return function.__module__ == "builtins" or isinstance(owner, str) or is_container(owner)


def call_builtin(function, args, reader):
    """What it may return, and what `setattr` writes."""
    if isinstance(function.__self__, str) or is_container(function.__self__):
        return call_method_of_container(function.__self__, function.__name__)
    if function in (getattr, setattr):
        found = reader.expressions.attributes_named(*args[:2])
        if function is getattr:
            return found
        reader.findings.write(found)
    if function in (iter, sorted):
        return Values.of(Many(elements(args[0])))
    return elements(args[0]) if function is next else NOTHING


def call_method_of_container(container, name):
    """What a method of a string, a real container or one that the source made may return."""
    if isinstance(container, str):
        return formatted(Values.of(container)) if name == "format" else NOTHING
    if name == "items" and isinstance(container, dict):
        return Values.of(tuple(container.items()))
    held = elements(Values.of(container))
    if name == "items":
        return Values.of(Many(Values.of(Row([NOTHING, held]))))
    return Values.of(Many(held)) if name in ("values", "copy") else held


def call_builtin_class(cls, args, kwargs, calls):
    """What making a container, or the like of `zip`, gives."""
    if cls is zip:
        return Values.of(Many(Values.of(Row([elements(values) for values in args]))))
    if cls is enumerate:
        return Values.of(Many(Values.of(Row([NOTHING, elements(args[0])]))))
    if cls is map:
        each = [elements(values) for values in args[1:]]
        return Values.of(Many(union([calls.call(function, each, {}) for function in args[0].values()])))
    if cls in _CONTAINERS:
        return Values.of(Many(union([*map(elements, args), *kwargs.values()])))
    return NOTHING
