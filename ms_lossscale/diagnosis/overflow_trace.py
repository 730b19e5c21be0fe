"""A trace: the first overflow of a batch, in numbers and in words."""

from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale._values import as_array, is_float
from ms_lossscale._words import in_mode, written_scale


class Range(NamedTuple):
    """
    A summary of the values of a tensor.

    - **dtype** (str) - Its dtype.
    - **shape** (tuple[int]) - Its shape.
    - **min** (Union[float, None]) - The smallest finite value, with its sign; None if no value is finite.
    - **max** (Union[float, None]) - The largest finite value.
    - **non_finite** (int) - How many values are infinite or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    min: Optional[float]
    max: Optional[float]
    non_finite: int

    def __str__(self) -> str:
        finite = "no finite value" if self.min is None else f"{self.min:.4g} to {self.max:.4g}"
        return f"{self.dtype} {self.shape}: {finite}" + (f", {self.non_finite} non-finite" if self.non_finite else "")


class OverflowTrace(NamedTuple):
    """
    The first overflow that :func:`locate_overflow` found; `print(trace)` says it in words.

    - **found** (bool) - Whether there is an overflow. If not, the other fields have no meaning.
    - **loss_scale** (float) - The scale by which the loss was multiplied.
    - **cell** (str) - The name of the cell.
    - **direction** (str) - ``"forward"`` or ``"backward"`` .
    - **what** (str) - In the forward ``"output"`` , or the name of a frozen Parameter or buffer that the forward wrote,
      such as a moving variance. In the backward, ``"gradient"`` for the gradient of the cell's input; the name of a
      parameter of the cell for its gradient; or ``"loss"`` for the gradient of the loss itself, which is the loss
      scale.
    - **kind** (str) - ``"inf"`` , ``"NaN"`` , or ``"saturated"`` for a finite value of 65504 or beyond.
    - **index** (tuple[int]) - Where in the tensor the first such value is.
    - **value** (float) - The value.
    - **tensor** (Range) - The tensor that holds it.
    - **inputs** (tuple[Range]) - The cell's inputs in the forward.
    - **note** (str) - A remark, or an empty text.
    - **batch** (int) - The number of the batch, counted from 0.
    - **train** (bool) - Whether the network ran in training mode.
    - **every_scale** (str) - What is not finite in the backward at any loss scale, and what to write instead; or an
      empty text.
    """

    found: bool
    loss_scale: float
    cell: str = ""
    direction: str = ""
    what: str = ""
    kind: str = ""
    # Hides a method of tuples.
    index: tuple[int, ...] = ()  # type: ignore[assignment]
    value: float = 0.0
    tensor: Optional[Range] = None
    inputs: tuple[Range, ...] = ()
    note: str = ""
    batch: int = 0
    train: bool = True
    every_scale: str = ""

    def __str__(self) -> str:
        ran = f"at loss scale {written_scale(self.loss_scale)} {in_mode(self.train)}"
        if not self.found:
            other = " (train=False looks at evaluation)" if self.train else ""
            none = f"No overflow: all values are finite and below 65504 in float16 {ran}{other}."
            return f"{none} {self.note}".rstrip()
        of_batch = f" of batches[{self.batch}]" if self.batch else ""
        lines = [f"The first overflow{of_batch} {ran} is in the {self.direction} of {self.cell}: {self.in_words()}"]
        if self.tensor is not None:
            lines[0] += f" ({self.value:g}) at {self.index}"
            lines.append(f"tensor: {self.tensor}")
        lines += [f"the cell's input {i}: {values}" for i, values in enumerate(self.inputs)]
        return "\n  ".join([*lines, *filter(None, (self.note, self.every_scale))])

    def on_every_scale(self) -> str:
        """Says of what is not finite in the backward at a very small loss scale that it is so at every other."""
        float32 = ""
        if self.tensor is not None and self.tensor.dtype == "Float16":
            float32 = " Or the derivative overflows in float16: advise_float32 tells whether float32 mends that."
        return (
            f"In the backward of {self.cell}, {self.in_words()} at every loss scale, while the loss is finite: a "
            f"derivative is infinite there, as that of a root or norm of exactly 0. Add an epsilon under the root, "
            f"ops.sqrt(x + 1e-6); ops.where after it does not help.{float32}"
        )

    def in_words(self, cell: str = "") -> str:
        """Says what overflows, and in which cell, if it is named."""
        what = f"the gradient of {'the loss' if self.what == 'loss' else self.what}"
        if self.what == "output":
            what = f"{cell}'s output" if cell else "its output"
        elif self.what == "gradient":
            what = f"the gradient that {cell or 'it'} passes back"
        elif self.direction == "forward":
            what = f"{self.what}, which {cell or 'it'} writes,"
        return f"{what} is {self.kind}"


def ranges_of(values):
    """Returns the ranges of those of these values that are tensors of floating-point numbers."""
    ranges = []
    for tensor in filter(is_float, values):
        array = as_array(tensor)
        finite = array[np.isfinite(array)]
        smallest = float(finite.min()) if finite.size else None
        largest = float(finite.max()) if finite.size else None
        ranges.append(Range(str(tensor.dtype), array.shape, smallest, largest, array.size - finite.size))
    return tuple(ranges)
