"""Profiles the values inside a network."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Optional, Union

from ms_lossscale._arguments import Batches, check_scale
from ms_lossscale._output import in_batches
from ms_lossscale._values import as_array
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.arguments import each_batch, trained_parts
from ms_lossscale.diagnosis.cell_watch import Place, watching
from ms_lossscale.diagnosis.distribution import Distribution
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.report import NOTABLE_SHARE, Report, one_or_each
from ms_lossscale.function_network import Network


class Activation(NamedTuple):
    """
    The values at one place in a network.

    - **place** (Place) - The cell, which of its calls, and which item of what it returns.
    - **kind** (str) - ``"output"`` for the cell's output, ``"gradient"`` for the gradient that flows back into it; if
      one network returns several losses, ``"gradient of losses[0]"`` and so on.
    - **dtype** (str) - The dtype in which the network held the values, for example ``"Float16"`` .
    - **distribution** (Distribution) - The values as the network computed them.
    - **keeps_float32** (bool) - Whether the network holds the values in float32 although it computes in float16 or
      bfloat16 elsewhere. Then it does not matter here what float16 can't hold.
    """

    place: Place
    kind: str
    dtype: str
    distribution: Distribution
    keeps_float32: bool = False

    @property
    def outside(self) -> float:
        """The share of values that are not finite, or that float16 can hold neither as normal numbers nor as zeros."""
        return self.distribution.share_of_non_finite + sum(self.distribution.shares())

    @property
    def is_notable(self) -> bool:
        """Whether values leave float16's range here, or all values are zero."""
        d = self.distribution
        return d.is_all_zero or (d.share_of_non_finite if self.keeps_float32 else self.outside) >= NOTABLE_SHARE

    def __str__(self) -> str:
        return f"{self.place} {self.kind}"


@dataclass(eq=False, repr=False)
class ActivationReport(Report):
    """
    The values at each cell of a network, as :func:`profile_activations` found them.

    `print(report)` prints a table. Its first lines are the notable places in the order of execution, so the first line
    is the first such place. A place is notable if at least 1 % of the values leave float16's range, or if all values
    are zero (they may have left it before). If a network computes only partly in float16, what it keeps in float32 is
    not judged by that range.

    Attributes:
        activations (list[Activation]): In the order of execution, forward and then backward.
        batches (int): How many batches were profiled.
        loss_scale (Union[float, list[float]]): The scale by which the loss was multiplied; a list with one for each
            network if they differ.
        forward_state (Union[list[str], None]): The names of what a skipped step of the training cell restores; None for
            a network.
    """

    _first_columns = "cell", "dtype"

    activations: list[Activation]
    batches: int
    loss_scale: Union[float, list[float]]
    forward_state: Optional[list[str]] = None

    @property
    def first(self) -> Optional[Activation]:
        """The first notable :class:`Activation`, see `Activation.is_notable`; None if there is none."""
        return next((activation for activation in self.activations if activation.is_notable), None)

    def notable_first(self) -> list[Activation]:
        """The activations as they are printed: first the notable ones, then the others, in the order of execution."""
        return sorted(self.activations, key=lambda activation: not activation.is_notable)

    def _title(self):
        return f"Values at the cells {in_batches(self.batches)}, gradients at loss scale {self._scale()}"

    def _rows(self):
        return [((f"{'* ' if a.is_notable else '  '}{a}", a.dtype), a.distribution) for a in self.notable_first()]

    def _shown_scales(self):
        return {1.0: ""}

    def _remarks(self):
        if self.forward_state is None:
            return self._warnings()
        return [*self._warnings(), f"A skipped step restores: {', '.join(self.forward_state) or 'nothing'}."]

    def _warnings(self):
        meaning = "* marks places where 1 % of the values or more are outside of float16's normal range or all are zero"
        if any(activation.keeps_float32 for activation in self.activations):
            meaning += " (but for places that a network partly in float16 keeps in float32)"
        notable = sum(activation.is_notable for activation in self.activations)
        meaning += f": {notable} of {len(self.activations)}, in the order of execution."
        return [meaning + (f" The first is {self.first}." if notable else "")]

    def _csv(self):
        columns = [*Place._fields, "kind", "dtype"]
        return columns, [([*a.place, a.kind, a.dtype], a.distribution) for a in self.notable_first()]

    def _content_as_dicts(self):
        activations = [
            {**place._asdict(), "kind": kind, "dtype": dtype, "float16": d.shares()._asdict(), **d.as_dict()}
            for place, kind, dtype, d, _ in self.activations
        ]
        return {"activations": activations}


def profile_activations(network: Network, batches: Batches, *, loss_scale: Optional[float] = None) -> ActivationReport:
    """
    Counts how the outputs of each cell, and the gradients that flow back into them, are spread over float16's range.

    It runs forward and backward in PyNative mode and updates nothing. The network is the same afterwards, including
    BatchNorm's statistics, and so is MindSpore's mode. Only dropout goes on with other random numbers if training
    itself runs in PyNative mode, because MindSpore keeps their state inside the operators.

    If a network takes a gradient in its forward (a gradient penalty), PyNative mode loses second derivatives. The
    gradients that flow back into its cells lack them, and a warning says so. Cells that `vmap` or `jacrev` transforms
    can't be watched, nor can a network that runs only in graph mode; :func:`profile_gradients` works for both.

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell of this package; or a function, as for :func:`profile_gradients`.
        batches (iterable): A tuple of the network's inputs for each batch; or a dataset.
        loss_scale (float, optional): The scale by which the loss is multiplied. The gradients are counted without
            unscaling them. Default: ``None`` . A training cell then uses its present scale, or those of its networks,
            and a plain network uses 1.

    Returns:
        ActivationReport.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no batches, or if `loss_scale` is out of range.
        RuntimeError: If the network fails on a batch, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_lossscale import profile_activations
        >>> network = nn.WithLossCell(nn.Dense(2, 1, weight_init="ones", has_bias=False), nn.MSELoss())
        >>> batch = np.full((4, 2), 1e-5, np.float32), np.zeros((4, 1), np.float32)
        >>> report = profile_activations(network, [batch])
        >>> print(report.first)
        _backbone output
    """
    owner = "profile_activations"
    parts = trained_parts(owner, network)
    if loss_scale is not None:
        loss_scale = check_scale(owner, "loss_scale", loss_scale)
    scales = [loss_scale or part.loss_scale or 1.0 for part in parts]
    # By the number of the part, the kind and the place, in the order of execution.
    seen: dict[tuple[int, str, Place], tuple[str, Distribution]] = {}

    def note(i, kind, place, tensor, _=()):
        # One network with several losses has one forward.
        if kind == "gradient" or i == 0 or parts[i - 1].network is not parts[i].network:
            seen.setdefault((i, kind, place), (str(tensor.dtype), Distribution()))[1].add(as_array(tensor))

    with replay(owner, parts) as replayed:
        for count, batch in enumerate(each_batch(owner, batches), start=1):
            with running(owner, f"batches[{count - 1}]"):
                for i, (part, loss_and_grads) in enumerate(zip(parts, replayed)):
                    with watching(part.network, part.names(), partial(note, i, "output"), partial(note, i, "gradient")):
                        loss_and_grads.of(scales[i], batch)
    is_mixed = any(dtype in ("Float16", "BFloat16") for dtype, _ in seen.values())
    activations = []
    for (i, kind, place), (dtype, distribution) in seen.items():
        if kind == "gradient" and sum(part.network is parts[i].network for part in parts) > 1:
            kind = f"gradient of losses[{parts[i].item}]"
        activations.append(Activation(place, kind, dtype, distribution, is_mixed and dtype == "Float32"))
    names = network.forward_state_names() if isinstance(network, TrainingCell) else None
    return ActivationReport(activations, count, one_or_each(scales), names)
