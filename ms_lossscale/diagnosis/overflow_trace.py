"""Where the first overflow of a batch is."""

from typing import NamedTuple, Optional


class Range(NamedTuple):
    """
    The values of a tensor in short.

    - **dtype** (str) - Its dtype.
    - **shape** (tuple[int]) - Its shape.
    - **min** (Union[float, None]) - The smallest finite value, with its sign; None if no value is finite.
    - **max** (Union[float, None]) - The largest one.
    - **non_finite** (int) - How many values are infinite or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    min: Optional[float]
    max: Optional[float]
    non_finite: int

    def fits(self, largest: float) -> bool:
        """Whether the finite values are below a bound, in absolute value."""
        return self.min is None or self.max is None or max(-self.min, self.max) < largest

    def __str__(self) -> str:
        finite = "no finite value" if self.min is None else f"{self.min:.4g} to {self.max:.4g}"
        return f"{self.dtype} {self.shape}: {finite}" + (f", {self.non_finite} non-finite" if self.non_finite else "")


class OverflowTrace(NamedTuple):
    """
    The first overflow that :func:`locate_overflow` found; `print(trace)` says it in words.

    - **found** (bool) - Whether there is an overflow; if not, the rest means nothing.
    - **loss_scale** (float) - The scale by which the loss was multiplied.
    - **cell** (str) - The name of the cell.
    - **direction** (str) - ``"forward"`` or ``"backward"`` .
    - **what** (str) - ``"output"`` ; in the backward ``"gradient"`` , of the cell's input, the name of the parameter of
      the cell whose gradient it is, or ``"loss"`` , the gradient of the loss itself, which is the loss scale.
    - **kind** (str) - ``"inf"`` , ``"NaN"`` , or ``"saturated"`` for a finite value of 65504 or beyond.
    - **index** (tuple[int]) - Where in the tensor the first such value is.
    - **value** (float) - The value.
    - **tensor** (Range) - The tensor that holds it.
    - **inputs** (tuple[Range]) - The cell's inputs in the forward.
    - **note** (str) - What else there is to say, or an empty text.
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

    def __str__(self) -> str:
        if not self.found:
            return f"No overflow: all values are finite and below 65504 in float16 at loss scale {self.loss_scale:g}."
        what = {
            "output": "its output",
            "gradient": "the gradient that it passes back",
            "loss": "the gradient of the loss",
        }.get(self.what, f"the gradient of {self.what}")
        lines = [
            f"The first overflow at loss scale {self.loss_scale:g} is in the {self.direction} of {self.cell}: {what} "
            f"is {self.kind} ({self.value:g}) at {self.index}",
            f"  tensor: {self.tensor}",
        ]
        lines += [f"  the cell's input {i}: {each}" for i, each in enumerate(self.inputs)]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)
