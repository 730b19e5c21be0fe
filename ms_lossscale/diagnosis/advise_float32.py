"""Advises which cells of a float16 network need float32."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import mindspore
from mindspore import nn

from ms_lossscale._arguments import Batches
from ms_lossscale._mindspore import casts_its_output, forget_compiled, is_cast, is_rewritten, put_in_float32
from ms_lossscale._output import counted, size, text_table, written_scale
from ms_lossscale._values import on_not_finite
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.arguments import (
    ParametersOrBatches,
    each_batch,
    join_names,
    kind_of,
    not_finite_weights_of,
    trained_parts,
)
from ms_lossscale.diagnosis.distribution import FLOAT16
from ms_lossscale.diagnosis.float32_search import Trials, needed_cells
from ms_lossscale.diagnosis.locate_overflow import OverflowTrace
from ms_lossscale.diagnosis.replay import replay
from ms_lossscale.function_network import FunctionNetwork, Network

_CASTS_BY_HAND = (
    "Casts that are written in a construct, such as x.astype(mstype.float16), can't be switched from outside, and in "
    "graph mode they stay: change them in the code."
)


class NeedOfFloat32(NamedTuple):
    """
    Why a cell needs float32.

    - **cell** (str) - The cell's name.
    - **kind** (str) - Its class.
    - **trace** (OverflowTrace) - The first overflow when all the other cells are in float32, but not this one.
    - **largest** (float) - The largest absolute value there when this cell is in float32, too.
    """

    cell: str
    kind: str
    trace: OverflowTrace
    largest: float

    def row(self) -> list[str]:
        """Returns the row of the table."""
        whose = "its" if self.trace.cell == self.cell else f"{self.trace.cell}'s"
        what = {"output": f"{whose} output", "gradient": f"{whose} gradient of the input"}.get(self.trace.what)
        is_written = self.trace.direction == "forward"
        what = what or (f"{self.trace.what}, which it writes," if is_written else f"the gradient of {self.trace.what}")
        times = self.largest / FLOAT16.largest
        much = f"{times:.3g} x 65504" if times >= 1 else "fits: overflows on the way to it"
        said = f"{self.trace.direction}: {what} is {self.trace.kind}"
        return [self.cell, self.kind, said, f"{size(self.largest)} ({much})"]


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
        note (str): A remark, or an empty text.
        not_finite_weights (dict[str, int]): How many values are infinite or NaN, by the name of the weight, for those
            weights of the network that have any.
    """

    # The network that was asked about, the cells that were found, and the number of all cells.
    _owner: nn.Cell
    _found: dict[str, nn.Cell]
    _all_cells: int
    loss_scale: Optional[float]
    needs: list[NeedOfFloat32]
    runs: int
    trace: Optional[OverflowTrace] = None
    note: str = ""
    not_finite_weights: dict[str, int] = field(default_factory=dict)

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

        Raises:
            RuntimeError: If the code of a function itself must compute in float32, which only you can change.
        """
        if self._is_functions_code:
            what = f"the code of the function '{kind_of(self._owner)}' itself, which must compute in float32"
            raise RuntimeError(f"'apply()' can't change {what}. Cast there: x.astype(mindspore.float32).")
        for cell in self._found.values():
            put_in_float32(cell)
        if self._found:
            forget_compiled(self._owner)

    @property
    def _is_functions_code(self):
        return isinstance(self._owner, FunctionNetwork) and any(its is self._owner for its in self._found.values())

    def lines(self) -> str:
        """Returns the lines that do in a script what :meth:`apply` does here."""
        if self._is_functions_code:
            return f"# in {kind_of(self._owner)}, for what it computes itself:\nx = x.astype(mindspore.float32)"
        lines, last = ["import mindspore"], None
        for name, cell in self._found.items():
            network, within = self._place(name)
            if network != last:
                lines += ["", f"cells = dict({network}.cells_and_names())"]
            lines.append(f"cells[{within!r}].to_float(mindspore.float32)")
            # It, or cells in it, may cast what comes out of others.
            for inner in (inner for inner, each in cell.cells_and_names() if casts_its_output(each)):
                lines.append(f"cells[{join_names(within, inner)!r}].dtype = mindspore.float32")
            last = network
        return "\n".join(lines)

    def _place(self, name):
        """Returns how a script names the network of a cell, and the cell's name in it."""
        if isinstance(self._owner, FunctionNetwork):
            variable = next(its for its in self._owner.names_of_cells if f"{name}.".startswith(f"{its}."))
            return variable, name[len(variable) + 1 :]
        network = "cell.network" if isinstance(self._owner, TrainingCell) else "network"
        number, within = re.fullmatch(r"(?:networks(\[\d+\])\.?)?(.*)", name).groups("")
        return network + number, within

    def __str__(self) -> str:
        tried = f"(tried in {counted(self.runs, 'run', 'runs')})."
        up_to = (
            f"the batches are finite, forward and backward, up to loss scale {written_scale(self.loss_scale or 1.0)}"
        )
        weights = "" if self.trace and self.not_finite_weights else on_not_finite(self.not_finite_weights)
        if not self.holds:
            all_cells = f"all {self._all_cells} cells in float32"
            text = [f"float32 does not help: with {all_cells} the batches are not finite either {tried}"]
            text.append(str(self.trace or ""))
        elif not self.cells:
            text = [f"No cell needs float32: {up_to} {tried}"]
        else:
            when = "after the network was put into float16 and before the first step"
            if self._was_rewritten:
                when = "before amp.auto_mixed_precision rewrites the network"
            header = ["cell", "kind", "overflows without float32", "largest value there in float32"]
            text = [
                f"{counted(len(self.cells), 'cell', 'cells')} of {self._all_cells} must compute in float32. With "
                f"exactly these {up_to}; without any one of them they are not {tried}",
                f"\n{text_table(header, [need.row() for need in self.needs])}",
                f"\nIn a script, {when}:\n\n{self.lines()}",
            ]
        return "\n".join(filter(None, [*text, self.note, weights]))


def advise_float32(
    network: Network, parameters: ParametersOrBatches = None, batches: Optional[Batches] = None
) -> Float32Advice:
    """
    Finds which cells of a float16 network must compute in float32 so that your batches have finite losses and gradients
    at a loss scale of 1 or more. If a training cell has a smaller `min_loss_scale`, that is the limit.

    It looks for as few and as small cells as possible, by trying: it begins with the whole network in float32, and
    goes on to the cells inside, and to those inside them, as long as some of them suffice. A cell also counts if
    float16 loses its output because of a division by infinity, as in a normalization whose squares overflow: the output
    is then zero. This takes tens of runs of the batches, forward and backward. A few batches are enough.

    It runs in PyNative mode. A network that runs in graph mode only can't be looked into, and if a network takes a
    gradient in its forward (a gradient penalty), PyNative mode loses second derivatives, and a warning says so.

    A cell in float32 casts its inputs to float32 and computes in float32, as with `cell.to_float(mindspore.float32)` .
    The float16 cells around it cast its output back. Its weights keep their dtype.

    Nothing changes: not the network, its optimizer, the loss scale, the counters, BatchNorm's statistics or MindSpore's
    mode. Only dropout goes on with other random numbers if training itself runs in PyNative mode.

    A training cell of this package knows its networks and weights: ``advise_float32(cell, batches)`` .

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell; or a function, as for :func:`profile_gradients`.
        parameters (list[Parameter], optional): The parameters to differentiate with respect to. Leave it out for a
            training cell. Default: ``None`` , all trainable ones.
        batches (iterable): A tuple of the network's inputs for each batch; or a dataset. They are kept in memory.

    Returns:
        Float32Advice.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no batches, or `parameters` is empty or not the network's.
        RuntimeError: If the network fails on a batch, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore import dtype as mstype
        >>> from ms_lossscale import advise_float32
        >>> layers = [nn.Dense(2, 2, weight_init="ones", has_bias=False), nn.LayerNorm((2,))]
        >>> net = nn.SequentialCell(*layers).to_float(mstype.float16)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> batch = np.full((4, 2), 4e4, np.float32), np.zeros((4, 2), np.float32)
        >>> advice = advise_float32(network, net.trainable_params(), [batch])
        >>> advice.cells, advice.holds
        (['_backbone.0', '_backbone.1'], True)
        >>> advice.apply()
    """
    owner = "advise_float32"
    if batches is None and isinstance(network, TrainingCell):
        parameters, batches = None, parameters
    parts = trained_parts(owner, network, parameters)
    batches, weights = list(each_batch(owner, batches)), not_finite_weights_of(parts)
    in_graph_mode = mindspore.get_context("mode") == mindspore.GRAPH_MODE
    if not isinstance(network, TrainingCell):
        network = parts[0].network
    with replay(owner, parts) as replayed:
        trials = Trials(owner, replayed, batches, min(part.floor for part in parts))
        names, loss_scale, needs, trace, note = [], None, [], None, ""
        if trials.are_finite([]) or trials.are_finite(trials.roots):
            names = needed_cells(trials)
            if trials.first_lost(names) is not None and trials.first_lost(trials.roots) is None:
                trials.counts_lost = True
                names = needed_cells(trials)
            needs, loss_scale = _needs(trials, names), trials.largest_scale(names)
        else:
            trace = trials.look(trials.roots)
        if not names and not any(map(is_cast, trials.cells.values())):
            note = f"No cell is cast by to_float or mindspore.amp, so that none could be switched. {_CASTS_BY_HAND}"
        elif names and in_graph_mode:
            note = f"This was tried in PyNative mode. {_CASTS_BY_HAND}"
        is_whole = names == trials.roots and not parts[0].prefix
        cells = {"" if is_whole else name: trials.cells[name] for name in names}
        return Float32Advice(network, cells, len(trials.cells), loss_scale, needs, trials.runs, trace, note, weights)


def _needs(trials, names):
    """Returns for each of the cells why it needs float32."""
    largest, needs = trials.seen(names)[1] if names else {}, []
    for name in names:
        trace, cell = trials.look([each for each in names if each != name]), trials.cells[name]
        needs.append(NeedOfFloat32(name, kind_of(cell), trace, largest[trace.direction, trace.cell]))
    return needs
