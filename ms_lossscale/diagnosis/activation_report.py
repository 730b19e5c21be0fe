"""What is known of the values inside a network."""

import json
import math
from collections.abc import Iterable
from typing import NamedTuple, Optional

from ms_lossscale._arguments import StrPath
from ms_lossscale._output import csv_text, in_batches, percent, size, text_table, write_text
from ms_lossscale.diagnosis.cell_watch import Place
from ms_lossscale.diagnosis.distribution import Distribution

# A place with less than this share of values out of range is not worth a look.
NOTABLE_SHARE = 0.01
# float16 rounds with a relative error of up to 2**-11; an error this many times the largest one before is a jump.
ROUNDING, JUMP = 2.0**-11, 8.0


class Activation(NamedTuple):
    """
    The values at one place in a network.

    - **place** (Place) - The cell, which of its calls, and which item of what it returns.
    - **kind** (str) - ``"output"`` for what the cell puts out, ``"gradient"`` for what flows back into it; where one
      network returns several losses, ``"gradient of losses[0]"`` and so on.
    - **dtype** (str) - In which dtype the network held the values, ``"Float16"`` say.
    - **distribution** (Distribution) - The values as the network computed them.
    - **relative_error** (Union[float, None]) - The 2-norm of the difference to the float32 computation, over the norm
      of the latter; None if it was not asked for.
    - **zeros_gained** (Union[int, None]) - How many values are zero but not so in float32.
    - **error_jumps** (bool) - Whether the relative error is 8 times that of all places before, or more.
    - **keeps_float32** (bool) - Whether the network holds the values in float32 though it computes in float16 or
      bfloat16 elsewhere: then what float16 can't hold is no matter here.
    """

    place: Place
    kind: str
    dtype: str
    distribution: Distribution
    relative_error: Optional[float] = None
    zeros_gained: Optional[int] = None
    error_jumps: bool = False
    keeps_float32: bool = False

    @property
    def outside(self) -> float:
        """The share of values that are not finite, or that float16 can't hold as normal numbers; zeros it can."""
        count = self.distribution.count
        non_finite = self.distribution.non_finite / count if count else 0.0
        return non_finite + sum(self.distribution.shares())

    @property
    def is_notable(self) -> bool:
        """Whether values leave float16's range here, all of them are zero, or the error jumps."""
        d = self.distribution
        share = d.non_finite / d.count if self.keeps_float32 and d.count else self.outside
        return self.error_jumps or share >= NOTABLE_SHARE or d.is_all_zero

    def __str__(self) -> str:
        return f"{self.place} {self.kind}"


class ActivationReport:
    """
    The values at each cell of a network, as :func:`profile_activations` found them.

    `print(report)` is a table. Its first lines are the places where values leave float16's range, at least 1 % of
    them, or all of them are zero (they may have left it already), or where the error against float32 jumps, in the
    order of execution: the first line is the first such place. What a network that computes partly in float16 keeps in
    float32 is not judged by that range.

    Attributes:
        activations (list[Activation]): In the order of execution, forward and then backward.
        batches (int): How many batches were profiled.
        loss_scale (float): The scale by which the loss was multiplied.
        forward_state (Union[list[str], None]): The names of what the forward may write, which a skipped step takes
            back; None for a training cell that never skips a step.
    """

    def __init__(
        self,
        activations: list[Activation],
        batches: int,
        loss_scale: float,
        forward_state: Optional[Iterable[str]] = (),
    ) -> None:
        self.activations = activations
        self.batches = batches
        self.loss_scale = loss_scale
        self.forward_state = None if forward_state is None else list(forward_state)

    @property
    def first(self) -> Optional[Activation]:
        """The first :class:`Activation` that is notable, see `Activation.is_notable`; None without one."""
        return next((activation for activation in self.activations if activation.is_notable), None)

    @property
    def first_jump(self) -> Optional[Activation]:
        """The first :class:`Activation` whose error against float32 jumps; None if there is none."""
        return next((activation for activation in self.activations if activation.error_jumps), None)

    def notable_first(self) -> list[Activation]:
        """
        The activations as they are printed: the notable ones, then the others, each in the order of execution.

        Returns:
            list[Activation].
        """
        return sorted(self.activations, key=lambda activation: not activation.is_notable)

    def __str__(self) -> str:
        compared = any(activation.relative_error is not None for activation in self.activations)
        header = ["cell", "dtype", "values", "zero %", "non-finite", "min", "max"]
        header += ["flushed %", "subnormal %", "overflowed %"]
        if compared:
            header += ["error", "zeros gained"]
        rows = []
        for activation in self.notable_first():
            d = activation.distribution
            row = [("* " if activation.is_notable else "  ") + str(activation), activation.dtype, f"{d.count:,}"]
            row += [percent(d.zeros / d.count if d.count else 0.0), f"{d.non_finite:,}", size(d.min), size(d.max)]
            row += [percent(share) for share in d.shares()]
            if compared:
                jump = " jump" if activation.error_jumps else ""
                row += [size(activation.relative_error) + jump, _count(activation.zeros_gained)]
            rows.append(row)
        notable = sum(activation.is_notable for activation in self.activations)
        meaning = "* marks places where 1 % of the values or more are outside of float16's normal range or all are zero"
        if any(activation.keeps_float32 for activation in self.activations):
            meaning += " (but for places that a network partly in float16 keeps in float32)"
        if compared:
            meaning += f", or the error against float32 is {JUMP:g} times that of all places before"
        lines = [
            f"Values at the cells {in_batches(self.batches)}, gradients at loss scale {self.loss_scale:g}; what "
            f"float16 does to them",
            "",
            text_table(header, rows),
            "",
            f"{meaning}: {notable} of {len(self.activations)}, in the order of execution."
            + (f" The first is {self.first}." if notable else ""),
            self._taken_back(),
        ]
        return "\n".join(lines)

    def _taken_back(self):
        if self.forward_state is None:
            return "What the forward may write is never taken back, since this training cell skips no step."
        return f"The forward may write, and a skipped step takes back: {', '.join(self.forward_state) or 'nothing'}."

    def to_csv(self, path: Optional[StrPath] = None) -> str:
        """
        A row for each place, in the order of :meth:`notable_first`.

        Args:
            path (str, optional): Where to write it, as a whole or not at all. Default: ``None`` , nowhere.

        Returns:
            str, the CSV text.
        """
        header = ["cell", "call", "item", "kind", "dtype", "count", "zeros", "non_finite", "min", "max"]
        header += ["flushed", "subnormal", "overflowed", "relative_error", "zeros_gained", "error_jumps"]
        rows = []
        for a in self.notable_first():
            d = a.distribution
            rows.append(
                [*a.place, a.kind, a.dtype, d.count, d.zeros, d.non_finite, d.min, d.max]
                + [*d.shares(), a.relative_error, a.zeros_gained, int(a.error_jumps)]
            )
        return write_text(path, csv_text(header, rows))

    def to_json(self, path: Optional[StrPath] = None) -> str:
        """
        All that the report knows, in the order of execution.

        Args:
            path (str, optional): Where to write it, as a whole or not at all. Default: ``None`` , nowhere.

        Returns:
            str, the JSON text.
        """
        activations = [
            {
                **a.place._asdict(),
                "kind": a.kind,
                "dtype": a.dtype,
                # JSON has no number for infinity.
                "relative_error": "inf" if a.relative_error == math.inf else a.relative_error,
                "zeros_gained": a.zeros_gained,
                "error_jumps": a.error_jumps,
                "float16": a.distribution.shares()._asdict(),
                **a.distribution.as_dict(),
            }
            for a in self.activations
        ]
        content = {
            "batches": self.batches,
            "loss_scale": self.loss_scale,
            "forward_state": self.forward_state,
            "activations": activations,
        }
        return write_text(path, json.dumps(content, indent=1))

    def plot(self, path: StrPath) -> None:
        """
        Draws the histograms, all together and by place, in the order of :meth:`notable_first`, with what float16 can't
        hold shaded.

        Args:
            path (str): The picture to write; its ending is its format, `.png` say.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from ms_lossscale.diagnosis.report_plot import plot_report

        rows = [(str(activation), activation.distribution) for activation in self.notable_first()]
        total = Distribution()
        for _, distribution in rows:
            total.merge(distribution)
        title = f"Values at {len(rows)} places {in_batches(self.batches)}"
        columns = {f"gradients at loss scale {self.loss_scale:g}": 1.0}
        plot_report(path, title, columns, "place, out of range first", rows, total)


def _count(number):
    return "-" if number is None else f"{number:,}"
