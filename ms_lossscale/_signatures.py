"""What the `construct` of a Cell takes, as far as that is certain. Nothing of the user's runs for it."""

import inspect
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Optional

from mindspore import nn

from ms_lossscale._arguments import describe


class Takes(NamedTuple):
    """What a function takes by position, without `self`."""

    # The names of its parameters, and the number of those that have no default.
    names: tuple[str, ...]
    required: int
    any_number: bool
    # Those that can only be passed by keyword, and have no default.
    by_keyword: tuple[str, ...]

    def fits(self, count: int) -> bool:
        """Returns whether it can be called with so many."""
        return not self.by_keyword and self.required <= count and (self.any_number or count <= len(self.names))

    def written(self) -> str:
        """Says how many inputs it takes, and their names."""
        most = "or more" if self.any_number else f"to {len(self.names)}"
        is_one_number = self.required == len(self.names) and not self.any_number
        number = str(self.required) if is_one_number else f"{self.required} {most}"
        names = f" ({', '.join(self.names)})" if self.names else ""
        by_keyword = f" and by keyword {', '.join(self.by_keyword)}" if self.by_keyword else ""
        return f"{number} {'input' if number == '1' else 'inputs'}{names}{by_keyword}"


def takes(cell: nn.Cell) -> Optional[Takes]:
    """Returns what a Cell takes when it is called; None if that is not certain."""
    if type(cell).__call__ is not nn.Cell.__call__ or cell._forward_pre_hook:
        return None
    function = inspect.getattr_static(cell, "construct")
    # Set on the object, by mindspore.amp for example, it must be a method to be called with the Cell.
    if "construct" in vars(cell) and not isinstance(function, MethodType):
        return None
    return _taken_by(function)


def _taken_by(function):
    if isinstance(function, MethodType):
        function = function.__func__
    # MindSpore's own wrappers, of `jit` for example, pass all on. Other people's may not.
    while type(function) is FunctionType and _is_wrapper_of_mindspore(function):
        function = function.__wrapped__
    if type(function) is not FunctionType:
        return None
    code, keywords = function.__code__, function.__kwdefaults__ or {}
    names, by_keyword = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
    any_number = bool(code.co_flags & inspect.CO_VARARGS)
    if not names:
        # `self` is among all others, or there is none.
        return None
    return Takes(
        names=names[1:],
        required=max(len(names) - len(function.__defaults__ or ()) - 1, 0),
        any_number=any_number,
        by_keyword=tuple(name for name in by_keyword[: code.co_kwonlyargcount] if name not in keywords),
    )


def _is_wrapper_of_mindspore(function):
    module = function.__globals__.get("__name__")
    return "__wrapped__" in vars(function) and isinstance(module, str) and module.split(".")[0] == "mindspore"


# What containers of cells have is there to say that they can't be called.
_NO_CONSTRUCTS = (nn.Cell.construct, nn.CellList.construct, nn.CellDict.construct)


def check_can_be_called(owner: str, name: str, value: Any, count: int, cure: str) -> None:
    """Raises a TypeError if a Cell, or a method of a Cell, surely can't be called with `count` inputs."""
    is_cell = isinstance(value, nn.Cell)
    its = takes(value) if is_cell else _taken_by(value)
    if is_cell and type(value).construct in _NO_CONSTRUCTS and "construct" not in vars(value):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a Cell that can be called, but '{type(value).__name__}' "
            f"does not define 'construct'. {cure}"
        )
    if its is not None and not its.fits(count):
        number = {0: "without inputs", 1: "with one input"}[count]
        raise TypeError(
            f"For '{owner}', the argument '{name}' is called {number}, but {describe(value)} takes {its.written()}. "
            f"{cure}"
        )
