"""
What type checkers know of a call of a training cell. How many values it returns depends on `has_aux`.

MindSpore has no type hints, so that a Tensor is Any to them. Each training cell has its constructor twice more, for
them alone: without aux it makes a cell of one of the tuples below, and otherwise one of ``tuple[Any, ...]``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, TypedDict, Union

from mindspore import Parameter, Tensor, nn

from ms_lossscale._arguments import AfterUpdate, OneOrEach
from ms_lossscale.overflow_detector import OverflowDetector

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Output = TypeVar("Output", default=tuple[Tensor, ...])
else:
    from typing import TypeVar

    Output = TypeVar("Output")

OfOneNetwork = tuple[Tensor, Tensor, Tensor]
OfSeveralNetworks = tuple[Tensor, Tensor, Tensor, Tensor]


class _Keywords(TypedDict, total=False):
    gradient_accumulation_steps: int
    forward_state: Sequence[Parameter]
    overflow_detector: Optional[OverflowDetector]
    max_retries: int


class KeywordsOfOne(_Keywords, total=False):
    """The keywords of the cell for one network, but for `has_aux`."""

    clip_norm: Optional[float]
    clip_value: Optional[float]
    ema_decay: Optional[float]
    gradient_transforms: Sequence[nn.Cell]
    after_update: Optional[AfterUpdate]


class KeywordsOfSeveral(_Keywords, total=False):
    """Those of the cells for several networks."""

    network_inputs: Optional[Sequence[Sequence[int]]]
    clip_norm: OneOrEach[Optional[float]]
    clip_value: OneOrEach[Optional[float]]
    ema_decay: OneOrEach[Optional[float]]
    gradient_transforms: Union[Sequence[nn.Cell], Sequence[Sequence[nn.Cell]]]
