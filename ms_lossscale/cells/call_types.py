"""
The types of a training cell's call. The number of returned values depends on `has_aux`, which is therefore a type
argument of the cell. MindSpore has no type hints, so type checkers see a Tensor as Any.
"""

from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from mindspore import Tensor

from ms_lossscale._arguments import OneOrEach

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The type arguments of cells for one network and for several. The defaults fit any such cell; pyright requires them
    # to be among those of the constructors.
    Aux = TypeVar("Aux", covariant=True, default=bool)
    AuxOfEach = TypeVar("AuxOfEach", covariant=True, default=OneOrEach[bool])
else:
    from typing import TypeVar

    Aux, AuxOfEach = TypeVar("Aux"), TypeVar("AuxOfEach")

# The types of what is passed to the constructors. For mypy, such an argument has no default.
HasAux = TypeVar("HasAux", Literal[False], bool)
HaveAux = TypeVar("HaveAux", Literal[False], OneOrEach[bool])

WithoutAux = TypeVar("WithoutAux", bound=tuple[Tensor, ...], covariant=True)


class Call(Protocol[WithoutAux, Aux]):
    """The type of `__call__`. It is not a method, since mypy can't distinguish types of a class with untyped bases."""

    @overload
    def __call__(self: "Call[WithoutAux, Literal[False]]", *args: Any, **kwargs: Any) -> WithoutAux: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]: ...
