"""Drawing the loss and the loss scale of a training."""

import csv
import os
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale._check import describe
from ms_lossscale._files import replacing
from ms_lossscale._matplotlib import matplotlib_figure
from ms_lossscale._types import StrPath

_COLUMNS = ("step", "network", "loss", "loss_scale", "skipped", "retries")


class History(NamedTuple):
    """
    The steps of one network, or of several with one verdict.

    Args:
        name (str): What tells it from others in the same picture; empty if there are none.
        step (list[int]): The number of each step.
        loss (list[float]): Its loss.
        loss_scales (list[tuple[float]]): Its loss scale; several if networks have their own.
        skipped (list[bool]): Whether it was skipped.
        retries (list[int]): How many further tries it took.
    """

    name: str
    step: list
    loss: list
    loss_scales: list
    skipped: list
    retries: list


def plot_scale(path: StrPath, picture: Optional[StrPath] = None, title: Optional[str] = None) -> Path:
    """
    Draws the loss and the loss scale over the steps of a training, with those marked that were skipped or done again
    at a lower scale.

    Args:
        path (str): The CSV file of a :class:`LossScaleMonitor`.
        picture (str, optional): The picture to write; its ending is the format, ``.png``, ``.svg`` or ``.pdf`` say.
            Default: ``None`` , the file's name with ``.png``.
        title (str, optional): Its title. Default: ``None`` , the file's name.

    Returns:
        pathlib.Path, the picture.

    Raises:
        TypeError: If `path` or `picture` is not a path.
        ValueError: If the file is none of a :class:`LossScaleMonitor`, or has no steps yet.
        OSError: If the file cannot be read, or the picture cannot be written.
        ImportError: If matplotlib is not installed.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import Model
        >>> from ms_lossscale import DynamicLossScale, LossScaleMonitor, ScaledTrainOneStepCell, plot_scale
        >>> network = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros")
        >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale(2.0**10))
        >>> data = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}
        >>> batches = dataset.NumpySlicesDataset(data, shuffle=False).batch(2)
        >>> folder = Path(tempfile.mkdtemp())
        >>> monitor = LossScaleMonitor(100, csv=folder / "scale.csv")
        >>> Model(cell).train(1, batches, callbacks=[monitor], dataset_sink_mode=False)
        >>> plot_scale(folder / "scale.csv").name
        'scale.png'
    """
    for name, value in (("path", path), ("picture", path if picture is None else picture)):
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"For 'plot_scale', the argument '{name}' must be a path, but got {describe(value)}.")
    path = Path(path)
    picture = path.with_suffix(".png") if picture is None else Path(picture)
    draw(picture, path.name if title is None else title, _read(path))
    return picture


def _read(path):
    """The histories in the CSV file of a LossScaleMonitor."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"For 'plot_scale', the argument 'path' must be a CSV file of LossScaleMonitor, but {str(path)!r} has "
                f"no columns {', '.join(missing)}."
            )
        # The last line may not be whole if the training still runs.
        rows = [row for row in reader if None not in (row[column] for column in _COLUMNS)]
    if not rows:
        raise ValueError(
            f"For 'plot_scale', the file {str(path)!r} has no steps. LossScaleMonitor writes them every "
            f"'every_n_steps' steps and at the end of each epoch."
        )
    networks = sorted({int(row["network"]) for row in rows})
    return [
        _history(f"network {network}" if len(networks) > 1 else "", [r for r in rows if int(r["network"]) == network])
        for network in networks
    ]


def _history(name, rows):
    return History(
        name,
        [int(row["step"]) for row in rows],
        [float(row["loss"]) for row in rows],
        [tuple(map(float, row["loss_scale"].split("/"))) for row in rows],
        [int(row["skipped"]) > 0 for row in rows],
        [int(row["retries"]) for row in rows],
    )


def draw(path, title, histories, loss_unit="", step_unit="step"):
    """
    Draws histories, one above the other.

    Args:
        path (Path): The picture to write.
        title (str): Its title.
        histories (list[History]): What happened.
        loss_unit (str): What the losses are measured in. Default: ``""`` .
        step_unit (str): What the steps are. Default: ``"step"`` .
    """
    figure = matplotlib_figure("Plotting a training")(figsize=(9, 6.5), dpi=120, layout="constrained")
    figure.suptitle(title)
    loss_axes, scale_axes = figure.subplots(2, sharex=True)
    colors = (f"C{i}" for i in range(10))
    for history in histories:
        number, loss, scales, skipped, retries = map(np.array, history[1:])
        of_network = f"{history.name}: " if history.name else ""
        window = max(1, min(50, len(number) // 20))
        color = next(colors)
        loss_axes.plot(number, loss, color=color, alpha=0.35, linewidth=0.8, label=f"{of_network}each step")
        mean = running_mean(loss, window)
        loss_axes.plot(number, mean, color=color, label=f"{of_network}mean of the last {window} steps")
        for i, scale in enumerate(scales.T):
            name = f"loss scale of network {i}" if len(scales.T) > 1 else f"{of_network}loss scale"
            scale_axes.step(number, scale, where="post", color=color if i == 0 else next(colors), label=name)
        for axes, values in ((loss_axes, loss), (scale_axes, scales[:, 0])):
            _mark(axes, number, values, skipped, f"{of_network}skipped: gradients overflowed", "x", "tab:red")
            again = (retries > 0) & ~skipped
            _mark(axes, number, values, again, f"{of_network}done again at a lower scale", "o", "tab:purple")
    loss_axes.set(title="Training loss", ylabel=loss_unit or "loss")
    if all(min(history.loss) >= 0 for history in histories):
        loss_axes.set_ylim(bottom=0)
    scale_axes.set_yscale("log", base=2)
    every_scale = [scale for history in histories for scales in history.loss_scales for scale in scales]
    scale_axes.set_ylim(min(every_scale) / 2, max(every_scale) * 2)
    scale_axes.set(title="Loss scale", ylabel="loss scale (log2 axis)", xlabel=step_unit)
    for axes in (loss_axes, scale_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    with replacing(path) as part:
        figure.savefig(part)


def _mark(axes, number, values, which, label, marker, color):
    if which.any():
        label = f"{label} ({which.sum()} steps)"
        axes.plot(number[which], values[which], marker, color=color, fillstyle="none", label=label)


def running_mean(values, window):
    """The mean of the last `window` values at each place, of those that are finite."""
    finite = np.isfinite(values)
    sums, counts = (
        np.convolve(terms, np.ones(window))[: len(values)] for terms in (np.where(finite, values, 0.0), finite)
    )
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
