"""
What type checkers know of a call of a training cell: how many values it returns depends on `has_aux`, which therefore
is a type argument of the cell. MindSpore has no type hints, so that to them a Tensor is Any.
"""

from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from mindspore import Tensor

from ms_lossscale._arguments import OneOrEach

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The type arguments of cells for one network and for several: by default those of any such cell, of which pyright
    # wants that they are among those of the constructors.
    Aux = TypeVar("Aux", covariant=True, default=bool)
    AuxOfEach = TypeVar("AuxOfEach", covariant=True, default=OneOrEach[bool])
else:
    from typing import TypeVar

    Aux, AuxOfEach = TypeVar("Aux"), TypeVar("AuxOfEach")

# What is passed to their constructors. To mypy such an argument has no default.
HasAux = TypeVar("HasAux", Literal[False], bool)
HaveAux = TypeVar("HaveAux", Literal[False], OneOrEach[bool])

WithoutAux = TypeVar("WithoutAux", bound=tuple[Tensor, ...], covariant=True)


class Call(Protocol[WithoutAux, Aux]):
    """The type of `__call__`. It is no method, since mypy can't tell apart the types of a class with untyped bases."""

    @overload
    def __call__(self: "Call[WithoutAux, Literal[False]]", *args: Any, **kwargs: Any) -> WithoutAux: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]: ...
