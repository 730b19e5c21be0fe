"""Functions as networks."""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, Optional, Union

from mindspore import GRAPH_MODE, Parameter, ParameterTuple, get_context, nn

from ms_lossscale._arguments import describe
from ms_lossscale.forward_state.reachable import OPTIMIZERS, Reach
from ms_lossscale.function_names import names_of

# What a network may be.
Network = Union[nn.Cell, Callable[..., Any]]


class FunctionNetwork(nn.Cell):
    """
    Makes a Cell of a function. It holds the Cells that the function reaches, and the Parameters that are in none of
    them, so that modes, checkpoints and optimizers know them. A Cell is named as in the function's code.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        reached = Reach((function,), ends=OPTIMIZERS).things
        cells = [each for each in reached if isinstance(each, nn.Cell) and not isinstance(each, OPTIMIZERS)]
        inner = {id(its) for cell in cells for _, its in cell.cells_and_names() if its is not cell}
        self.cells_of_function = nn.CellList([cell for cell in cells if id(cell) not in inner], auto_prefix=False)
        self.names_of_cells = names_of(function, self.cells_of_function)
        held = {id(parameter) for parameter in self.get_parameters()}
        others = [each for each in reached if isinstance(each, Parameter) and id(each) not in held]
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
    def code(self) -> Optional[types.CodeType]:
        """The function's code, None if it is something else that can be called."""
        return getattr(inspect.unwrap(self.function), "__code__", None)

    @property
    def binds_nothing(self) -> bool:
        """Whether the function is called with the inputs alone."""
        return not self._bound and not self._keywords

    def construct(self, *inputs):
        return self.function(*self._bound, *inputs, **self._keywords)


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
