"""The report on the values inside a network."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

from ms_lossscale._output import in_batches, size
from ms_lossscale.diagnosis.cell_watch import Place
from ms_lossscale.diagnosis.distribution import COUNTS, Distribution, Shares
from ms_lossscale.diagnosis.report import (
    COLUMNS,
    NOTABLE_SHARE,
    Picture,
    Report,
    columns_of,
    numbers_of,
    written_scales,
)

# float16 rounds with a relative error of up to 2**-11. An error this many times the largest before it is a jump.
ROUNDING, JUMP = 2.0**-11, 8.0


class Activation(NamedTuple):
    """
    The values at one place in a network.

    - **place** (Place) - The cell, which of its calls, and which item of what it returns.
    - **kind** (str) - ``"output"`` for the cell's output, ``"gradient"`` for the gradient that flows back into it; if
      one network returns several losses, ``"gradient of losses[0]"`` and so on.
    - **dtype** (str) - The dtype in which the network held the values, for example ``"Float16"`` .
    - **distribution** (Distribution) - The values as the network computed them.
    - **relative_error** (Union[float, None]) - The 2-norm of the difference from the float32 values, divided by the
      norm of these; None if you did not ask for it, or if it `varies` .
    - **zeros_gained** (Union[int, None]) - How many values are zero here but not in float32.
    - **error_jumps** (bool) - Whether the relative error is at least 8 times that of all places before.
    - **keeps_float32** (bool) - Whether the network holds the values in float32 although it computes in float16 or
      bfloat16 elsewhere. Then it does not matter here what float16 can't hold.
    - **varies** (bool) - Whether the values differ between two runs as they are, so that they can't be compared with
      float32: the forward draws random numbers, say.
    """

    place: Place
    kind: str
    dtype: str
    distribution: Distribution
    relative_error: Optional[float] = None
    zeros_gained: Optional[int] = None
    error_jumps: bool = False
    keeps_float32: bool = False
    varies: bool = False

    @property
    def outside(self) -> float:
        """The share of values that are not finite, or that float16 can hold neither as normal numbers nor as zeros."""
        d = self.distribution
        return d.non_finite / max(d.count, 1) + sum(d.shares())

    @property
    def is_notable(self) -> bool:
        """Whether values leave float16's range here, all values are zero, or the error jumps."""
        d = self.distribution
        share = d.non_finite / max(d.count, 1) if self.keeps_float32 else self.outside
        return self.error_jumps or share >= NOTABLE_SHARE or d.is_all_zero

    def __str__(self) -> str:
        return f"{self.place} {self.kind}"


@dataclass(eq=False, repr=False)
class ActivationReport(Report):
    """
    The values at each cell of a network, as :func:`profile_activations` found them.

    `print(report)` prints a table. Its first lines are the notable places in the order of execution, so the first line
    is the first such place. A place is notable if at least 1 % of the values leave float16's range, if all values are
    zero (they may have left it before), or if the error against float32 jumps. If a network computes only partly in
    float16, what it keeps in float32 is not judged by that range.

    Attributes:
        activations (list[Activation]): In the order of execution, forward and then backward.
        batches (int): How many batches were profiled.
        loss_scale (Union[float, list[float]]): The scale by which the loss was multiplied; a list with one for each
            network if they differ.
        forward_state (Union[list[str], None]): The names of what the forward may write and a skipped step restores;
            None for a training cell that never skips a step.
    """

    activations: list[Activation]
    batches: int
    loss_scale: Union[float, list[float]]
    forward_state: Optional[list[str]] = field(default_factory=list)

    @property
    def first(self) -> Optional[Activation]:
        """The first notable :class:`Activation`, see `Activation.is_notable`; None if there is none."""
        return next((activation for activation in self.activations if activation.is_notable), None)

    @property
    def first_jump(self) -> Optional[Activation]:
        """The first :class:`Activation` whose error against float32 jumps; None if there is none."""
        return next((activation for activation in self.activations if activation.error_jumps), None)

    def notable_first(self) -> list[Activation]:
        """The activations as they are printed: first the notable ones, then the others, in the order of execution."""
        return sorted(self.activations, key=lambda activation: not activation.is_notable)

    def _headline(self) -> str:
        return (
            f"Values at the cells {in_batches(self.batches)}, gradients at loss scale "
            f"{written_scales(self.loss_scale)}; what float16 does to them"
        )

    def _table(self) -> tuple[list[str], list[list[str]]]:
        compared = self._is_compared()
        header = ["cell", "dtype", *COLUMNS, "flushed %", "subnormal %", "overflowed %"]
        if compared:
            header += ["error", "zeros gained"]
        rows = []
        for activation in self.notable_first():
            row = [_marked(activation), activation.dtype]
            row += columns_of(activation.distribution)
            if compared:
                jump = " jump" if activation.error_jumps else ""
                gained = "-" if activation.zeros_gained is None else f"{activation.zeros_gained:,}"
                row += ["varies" if activation.varies else size(activation.relative_error) + jump, gained]
            rows.append(row)
        return header, rows

    def _remarks(self) -> list[str]:
        restored = "What the forward may write is never restored, since this training cell skips no step."
        if self.forward_state is not None:
            names = ", ".join(self.forward_state) or "nothing"
            restored = f"The forward may write, and a skipped step restores: {names}."
        return [*self._marks_and_variation(), restored]

    def _marks_and_variation(self):
        return [self._meaning_of_marks(), *self._what_varies()]

    def _is_compared(self):
        return any(each.relative_error is not None or each.varies for each in self.activations)

    def _meaning_of_marks(self):
        meaning = "* marks places where 1 % of the values or more are outside of float16's normal range or all are zero"
        if any(activation.keeps_float32 for activation in self.activations):
            meaning += " (but for places that a network partly in float16 keeps in float32)"
        if self._is_compared():
            meaning += f", or the error against float32 is {JUMP:g} times that of all places before"
        notable = sum(activation.is_notable for activation in self.activations)
        meaning += f": {notable} of {len(self.activations)}, in the order of execution."
        return meaning + (f" The first is {self.first}." if notable else "")

    def _what_varies(self):
        varying = [each for each in self.activations if each.varies]
        if not varying:
            return []
        return [
            f"{len(varying)} of {len(self.activations)} places differ between two runs as they are, so they can't be "
            f"compared with float32: the forward draws random numbers, or depends on something else that changes. The "
            f"first is {varying[0]}. Give it the same numbers in each run to compare it."
        ]

    def _header_and_rows(self) -> tuple[list[str], list[list]]:
        header = [*Place._fields, "kind", "dtype", *COUNTS, *Shares._fields]
        header += ["relative_error", "zeros_gained", "error_jumps", "varies"]
        rows = []
        for a in self.notable_first():
            compared = [a.relative_error, a.zeros_gained, int(a.error_jumps), int(a.varies)]
            rows.append([*a.place, a.kind, a.dtype, *numbers_of(a.distribution), *compared])
        return header, rows

    def _further_content(self) -> dict[str, Any]:
        activations = [
            {
                **a.place._asdict(),
                "kind": a.kind,
                "dtype": a.dtype,
                # JSON has no number for infinity.
                "relative_error": "inf" if a.relative_error == math.inf else a.relative_error,
                "zeros_gained": a.zeros_gained,
                "error_jumps": a.error_jumps,
                "varies": a.varies,
                "float16": a.distribution.shares()._asdict(),
                **a.distribution.as_dict(),
            }
            for a in self.activations
        ]
        return {"activations": activations}

    def _picture(self) -> Picture:
        rows = [(_marked(activation), activation.distribution) for activation in self.notable_first()]
        scales = {f"gradients at loss scale {written_scales(self.loss_scale)}": 1.0}
        title = f"Values at {len(rows)} places {in_batches(self.batches)}"
        return Picture(title, scales, "place, out of range first", rows, self._marks_and_variation())


def _marked(activation):
    return ("* " if activation.is_notable else "  ") + str(activation)
