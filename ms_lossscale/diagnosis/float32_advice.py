"""The advice on which cells need float32, as text and as lines to paste."""

from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from mindspore import nn

from ms_lossscale._arguments import listed
from ms_lossscale._mindspore import casts_its_output, forget_compiled, is_rewritten, put_in_float32
from ms_lossscale._output import counted, size, text_table, written_scale
from ms_lossscale._values import on_not_finite, on_unreached
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.arguments import join_names
from ms_lossscale.diagnosis.distribution import FLOAT16
from ms_lossscale.diagnosis.locate_overflow import OverflowTrace


class NeedOfFloat32(NamedTuple):
    """
    Why a cell needs float32.

    - **cell** (str) - The cell's name.
    - **kind** (str) - Its class.
    - **trace** (OverflowTrace) - The first overflow when all the other cells are in float32, but not this one.
    - **largest** (float) - The largest absolute value there when this cell is in float32, too.
    - **line** (str) - The line of code where the forward of a cell of this kind makes values infinite or NaN, if any.
    """

    cell: str
    kind: str
    trace: OverflowTrace
    largest: float
    line: str

    def row(self) -> list[str]:
        """Returns the row of the table."""
        trace = self.trace
        whose = "its" if trace.cell == self.cell else f"{trace.cell}'s"
        what = {"output": f"{whose} output", "gradient": f"{whose} gradient of the input"}.get(
            trace.what,
            f"the gradient of {trace.what}" if trace.direction == "backward" else f"{trace.what}, which it writes,",
        )
        times = self.largest / FLOAT16.largest
        much = f"{times:.3g} x 65504" if times >= 1 else "fits: overflows on the way to it"
        return [
            self.cell or "(the whole network)",
            self.kind,
            f"{trace.direction}: {what} is {trace.kind}",
            f"{size(self.largest)} ({much})",
        ]


class Widening(NamedTuple):
    """
    What one more cell in float32 gains.

    - **cell** (str) - The cell's name.
    - **powers** (int) - By how many powers of two the range of useful loss scales becomes wider.
    - **loss_scale** (float) - The largest power of two at which the batches are then finite.
    - **lost** (list[str]) - The weights whose gradients are lost at the largest scale without it.
    """

    cell: str
    powers: int
    loss_scale: float
    lost: list[str]

    def __str__(self) -> str:
        return (
            f"At the largest loss scale float16 loses most gradients of {listed(self.lost, 3)}. {self.cell} in "
            f"float32, too, widens the range of scales most, by {self.powers} powers of two: cells[{self.cell!r}]"
            f".to_float(mindspore.float32)"
        )


@dataclass(eq=False, repr=False)
class Float32Advice:
    """
    The result of :func:`advise_float32`. `print(advice)` shows the reasons, and the lines to paste into a script.

    Attributes:
        cells (list[str]): The names of the cells that must compute in float32, as in `network.cells_and_names()`; with
            several networks, ``networks[i].`` comes before them. Empty if no cell must, or if float32 does not help.
        holds (bool): Whether the batches are finite, forward and backward, with exactly these cells in float32.
        loss_scale (Union[float, None]): The largest power of two at which they are finite; None if `holds` is False.
        needs (list[NeedOfFloat32]): The reason for each of the cells.
        runs (int): How many times the batches were run to find this out.
        trace (Union[OverflowTrace, None]): If `holds` is False, what overflows first with all cells in float32.
        widening (Union[Widening, None]): If gradients are lost at `loss_scale`, the further cell that widens the range
            of loss scales most if it computes in float32, and by how much. It is not one of `cells`.
        note (str): A remark, or an empty text.
        not_finite_weights (dict[str, int]): How many values are infinite or NaN, by the name of the weight, for those
            weights of the network that have any.
        unreached (list[Union[int, None]]): The numbers of the optimizers all of whose gradients are exactly zero; None
            stands for the only one.
        in_register (Union[OverflowTrace, None]): Where an NPU's status register is raised with these cells in float32
            though all values are finite, so that training skips the step. None if it is not.
    """

    # The network that was asked about, the cells that were found, and the number of all cells.
    _owner: nn.Cell
    _found: dict[str, nn.Cell]
    _all_cells: int
    loss_scale: Optional[float]
    needs: list[NeedOfFloat32]
    runs: int
    trace: Optional[OverflowTrace] = None
    widening: Optional[Widening] = None
    note: str = ""
    not_finite_weights: dict[str, int] = field(default_factory=dict)
    unreached: list[Optional[int]] = field(default_factory=list)
    in_register: Optional[OverflowTrace] = None

    def __post_init__(self) -> None:
        self.cells = list(self._found)
        self.holds = self.loss_scale is not None
        # Once the advice is applied, they no longer are.
        inside = [each for cell in self._found.values() for _, each in cell.cells_and_names()]
        self._was_rewritten = any(map(is_rewritten, inside))

    def apply(self) -> None:
        """
        Puts the cells into float32, in place. The weights keep their dtype, so that the optimizer's state still fits.

        If a training cell or network has already run in graph mode, it is compiled again at its next call. But if it
        was compiled as a part of something else, it is not: call this before that.
        """
        for cell in self._found.values():
            put_in_float32(cell)
        if self._found:
            forget_compiled(self._owner)

    def lines(self) -> str:
        """Returns the lines that do in a script what :meth:`apply` does here."""
        lines = ["import mindspore"]
        for network, names in self._by_network().items():
            lines += ["", f"cells = dict({network}.cells_and_names())"]
            lines += [f"cells[{name!r}].to_float(mindspore.float32)" for name in names]
            # Those, or those in them, that cast what comes out of others.
            casts = [
                join_names(name, inner)
                for name, cell in names.items()
                for inner, each in cell.cells_and_names()
                if casts_its_output(each)
            ]
            lines += [f"cells[{name!r}].dtype = mindspore.float32" for name in casts]
        return "\n".join(lines)

    def _by_network(self):
        """Returns the cells by how a script names their network, with their names in it."""
        by_network = {}
        for name, cell in self._found.items():
            network, within = ("cell.network" if isinstance(self._owner, TrainingCell) else "network"), name
            if name.startswith("networks["):
                number, _, within = name[len("networks[") :].partition("]")
                network, within = f"{network}[{number}]", within.lstrip(".")
            by_network.setdefault(network, {})[within] = cell
        return by_network

    def __str__(self) -> str:
        tried = f"tried in {counted(self.runs, 'run', 'runs')}"
        if self.loss_scale is None:
            text = [
                f"float32 does not help: with all {self._all_cells} cells in float32 the batches are not finite either "
                f"({tried})."
            ]
            if self.trace is not None:
                look = "" if self.not_finite_weights else " Look at what goes in there."
                text = [f"{text[0]}{look}", str(self.trace)]
        elif not self.cells:
            text = [
                f"No cell needs float32: the batches are finite, forward and backward, up to loss scale "
                f"{written_scale(self.loss_scale)} ({tried})."
            ]
        else:
            text = self._what_to_do(written_scale(self.loss_scale), tried)
        if self.widening is not None:
            text += ["", str(self.widening)]
        weights = on_not_finite(self.not_finite_weights)
        if self.trace is not None and weights == self.trace.note:
            weights = ""
        remarks = (self.note, weights, on_unreached(self.unreached), str(self.in_register or ""))
        return "\n".join(text + [remark for remark in remarks if remark])

    def _what_to_do(self, loss_scale, tried):
        header = ["cell", "kind", "overflows without float32", "largest value there in float32"]
        code = {need.kind: need.line for need in self.needs if need.line}
        when = "before amp.auto_mixed_precision rewrites the network"
        if not self._was_rewritten:
            when = "after the network was put into float16 and before the first step"
        return [
            f"{counted(len(self.cells), 'cell', 'cells')} of {self._all_cells} must compute in float32. With exactly "
            f"these the batches are finite, forward and backward, up to loss scale {loss_scale}; without any one of "
            f"them they are not ({tried}).",
            "",
            text_table(header, [need.row() for need in self.needs]),
            *([""] if code else []),
            *(f"{kind}: {line}" for kind, line in code.items()),
            "",
            f"In a script, {when}:",
            "",
            self.lines(),
        ]
