"""Functions as networks."""

import ast
import collections
import contextlib
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable
from typing import Any, Union

from mindspore import GRAPH_MODE, Parameter, ParameterTuple, get_context, nn
from mindspore.experimental import optim as experimental_optim

from ms_lossscale._arguments import describe
from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale._mindspore import written_class

_OPTIMIZERS = (nn.Optimizer, experimental_optim.Optimizer)
# So many objects are looked at.
_LOOKS = 10_000
# What a network may be.
Network = Union[nn.Cell, Callable[..., Any]]


class FunctionNetwork(nn.Cell):
    """
    Makes a Cell of a function. It holds the Cells that the function reaches, and the Parameters that are in none of
    them, so that modes, checkpoints and optimizers know them. A Cell is named as in the function's code.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        named = _held_by(function)
        cells = {id(its): its for _, its in named if isinstance(its, nn.Cell)}
        inner = {id(its) for cell in cells.values() for _, its in cell.cells_and_names() if its is not cell}
        named = [(name, its) for name, its in named if id(its) not in inner]
        names = _different([name or written_class(its).__name__ for name, its in named if id(its) in cells])
        self.names_of_cells = names
        self.cells_of_function = nn.CellList([its for _, its in named if id(its) in cells], auto_prefix=False)
        held = {id(parameter) for parameter in self.get_parameters()}
        others = [its for _, its in named if isinstance(its, Parameter) and id(its) not in held]
        if others:
            self.parameters_of_function = ParameterTuple(others)
        # Graph mode can't call a functools.partial that binds a Cell.
        self.function, self._bound, self._keywords = _unbound(function)

    def cells(self):
        return iter(self.cells_of_function)

    def cells_and_names(self, cells=None, name_prefix=""):
        """Yields the same as for any Cell, but with the names from the function's code."""
        cells = cells or set()
        if self in cells:
            return
        cells.add(self)
        yield name_prefix, self
        for name, cell in zip(self.names_of_cells, self.cells_of_function):
            # Python takes an empty container for false.
            if cell:
                yield from cell.cells_and_names(cells, f"{name_prefix}.{name}" if name_prefix else name)

    @property
    def binds_nothing(self) -> bool:
        """Whether the function is called with the inputs alone."""
        return not self._bound and not self._keywords

    def construct(self, *inputs):
        return self.function(*self._bound, *inputs, **self._keywords)


def _held_by(function):
    """Returns the Cells and Parameters that a function's variables lead to, optimizers apart, each with its path."""
    found, seen, waiting = [], {}, collections.deque([("", function)])
    while waiting and len(seen) < _LOOKS:
        path, thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, (*_OPTIMIZERS, FixedAttributes, type, types.ModuleType)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, (nn.Cell, Parameter)):
            found.append((path, thing))
            continue
        variables, parts = _variables(thing), {}
        if isinstance(thing, (list, tuple)):
            parts = dict(enumerate(thing))
        elif isinstance(thing, dict):
            parts = thing
        elif not variables:
            parts = getattr(thing, "__dict__", {})
        waiting.extend([*variables.items(), *((f"{path or 'self'}.{name}", each) for name, each in parts.items())])
    return found


def _variables(function):
    """Returns what a function's code may use, by name: what is bound to it, its globals, closure and defaults."""
    if isinstance(function, functools.partial):
        names = getattr(getattr(function.func, "__code__", None), "co_varnames", map(str, range(len(function.args))))
        return {**_variables(function.func), **dict(zip(names, function.args)), **function.keywords}
    if isinstance(function, types.MethodType):
        return {"self": function.__self__, **_variables(function.__func__)}
    if not isinstance(function, types.FunctionType):
        return {}
    code, found = function.__code__, dict(getattr(function, "__kwdefaults__", None) or {})
    found.update((name, function.__globals__[name]) for name in _names_in(code) if name in function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # It has no value yet.
            found[name] = cell.cell_contents
    defaults = function.__defaults__ or ()
    return {**found, **dict(zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults))}


def _names_in(code):
    inner = (its for its in code.co_consts if isinstance(its, types.CodeType))
    return [*code.co_names, *(name for its in inner for name in _names_in(its))]


def _different(names):
    """Returns the names, with numbers after those that were there before."""
    found = []
    for name in names:
        count, unique = itertools.count(2), name
        while unique in found:
            unique = f"{name}_{next(count)}"
        found.append(unique)
    return found


def _unbound(function):
    """Returns the function of a functools.partial, and what it binds: a tuple and a dict, empty for others."""
    if type(function) is not functools.partial:
        return function, (), {}
    return function.func, function.args, function.keywords


def name_of(network: nn.Cell) -> str:
    """Returns what a network is called in a message: a function by its own name, a Cell by that of its class."""
    if not isinstance(network, FunctionNetwork):
        return type(network).__name__
    return _qualified_name(network.function)


def _qualified_name(function):
    return getattr(function, "__qualname__", type(function).__name__)


def names_of_functions(networks):
    """Returns the names of those networks that are functions, for a message."""
    return [name_of(its) for its in networks if isinstance(its, FunctionNetwork)]


def as_network(owner: str, name: str, value: Any) -> nn.Cell:
    """Returns a network as a Cell. Raises unless `value` is a Cell or a function."""
    if isinstance(value, nn.Cell):
        return value
    # What is built into Python has no source, and reaches no Cell.
    if not callable(value) or isinstance(value, (type, types.BuiltinFunctionType)):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a Cell or a function that returns the loss, but got "
            f"{describe(value)}. Pass nn.WithLossCell(network, loss_fn), say, or a function forward(x, y)."
        )
    if get_context("mode") == GRAPH_MODE:
        _check_defaults(owner, name, value)
    return FunctionNetwork(value)


def _check_defaults(owner, name, function):
    """Raises if a default argument is a Cell that graph mode can't find: it looks defaults up by their names again."""
    function = inspect.unwrap(_unbound(function)[0])
    for default, value in _named_defaults(function):
        if isinstance(value, nn.Cell) and default not in function.__globals__:
            raise ValueError(
                f"For '{owner}', the argument '{name}', the function '{_qualified_name(function)}', has the default "
                f"'{default}', a Cell. MindSpore's graph mode looks a default up among the globals, where this one is "
                f"not. Let the function use the Cell by its name, or train in PYNATIVE_MODE."
            )


def _named_defaults(function):
    """Returns the names that a function's defaults have in its source, if they are names, and their values."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (TypeError, OSError, SyntaxError, ValueError):
        return []
    if not isinstance(definition, ast.FunctionDef) or isinstance(function, types.MethodType):
        return []
    arguments = definition.args
    nodes = [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [(node.id, value) for node, value in zip(nodes, values) if isinstance(node, ast.Name)]


def check_can_be_differentiated(owner: str, name: str, networks: Any) -> None:
    """Raises if graph mode can't differentiate one of the functions where the user's own code does so."""
    for i, each in enumerate(networks if get_context("mode") == GRAPH_MODE else ()):
        bound = [*each.args, *each.keywords.values()] if type(each) is functools.partial else []
        cells = [type(its).__name__ for its in bound if isinstance(its, nn.Cell)]
        if cells:
            raise ValueError(
                f"For '{owner}', '{name}[{i}]' is a functools.partial that binds a Cell, '{cells[0]}', which MindSpore "
                f"can't differentiate in graph mode. Write a function that uses the Cell by its name, pass the Cell "
                f"itself, or train in PYNATIVE_MODE."
            )


def as_networks(owner: str, name: str, value: Any) -> tuple[nn.Cell, ...]:
    """Returns a non-empty list, tuple or CellList of networks as a tuple of Cells."""
    if not isinstance(value, (list, tuple, nn.CellList)):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a list of Cells or functions, but got {describe(value)}."
        )
    if not len(value):
        raise ValueError(f"For '{owner}', the argument '{name}' must not be empty.")
    return tuple(as_network(owner, f"{name}[{i}]", each) for i, each in enumerate(value))
