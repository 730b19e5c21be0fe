"""Types of arguments, for type checkers."""

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar, Union

import numpy as np
from mindspore import Tensor
from mindspore.dataset import Dataset

T = TypeVar("T")

OneOrEach = Union[T, Sequence[T]]
StrPath = Union[str, os.PathLike[str]]
Batch = Union[Tensor, np.ndarray, Sequence[Union[Tensor, np.ndarray]]]
Batches = Union[Dataset, Iterable[Batch]]
