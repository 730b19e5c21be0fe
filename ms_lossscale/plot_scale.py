"""Draws the loss and the loss scale of a training."""

import contextlib
import csv
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale._arguments import StrPath, describe
from ms_lossscale._output import counted, matplotlib_figure, replacing

_COLUMNS = ("step", "network", "loss", "loss_scale", "skipped", "retries")
_WHAT = "Plotting a training"


class _Row(NamedTuple):
    """A row of the CSV file: its network, and what a History has for each step."""

    network: int
    step: int
    loss: float
    loss_scales: tuple
    skipped: bool
    retries: int


class History(NamedTuple):
    """The steps of one network, or of several that share an overflow check."""

    # Its name in a picture with several, else empty.
    name: str
    # For each step: its number, which never decreases; the loss; the loss scale, or several if networks have their own;
    # whether it was skipped; the number of retries.
    step: Sequence[int]
    loss: Sequence[float]
    loss_scales: Sequence[tuple[float, ...]]
    skipped: Sequence[bool]
    retries: Sequence[int]


def plot_scale(path: StrPath, picture: Optional[StrPath] = None, title: Optional[str] = None) -> Path:
    """
    Draws the loss and the loss scale over the steps of a training. It marks the steps that were skipped and those that
    were done again at a lower scale. If several trainings wrote to the file, it draws them one after the other.

    Args:
        path (str): The CSV file of a :class:`LossScaleMonitor`.
        picture (str, optional): The picture to write. Its ending decides the format, for example
            ``.png``, ``.svg`` or ``.pdf``. Default: ``None`` , the file's name with ``.png``.
        title (str, optional): Its title. Default: ``None`` , the file's name.

    Returns:
        pathlib.Path, the picture.

    Raises:
        TypeError: If `path` or `picture` is not a path.
        ValueError: If the file was not written by a :class:`LossScaleMonitor`, has no steps yet, or is of trainings
            with different numbers of loss scales; or if matplotlib can't write pictures of that format.
        OSError: If the file can't be read, or the picture can't be written.
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
    rows, trainings = _one_after_the_other(_read(path))
    picture = path.with_suffix(".png") if picture is None else Path(picture)
    formats = matplotlib_figure(_WHAT)().canvas.get_supported_filetypes()
    if picture.suffix[1:].lower() not in formats:
        raise ValueError(
            f"For 'plot_scale', the argument 'picture' must end in one of .{', .'.join(formats)}, but got "
            f"{str(picture)!r}."
        )
    networks = sorted({row.network for row in rows})
    histories = []
    for network in networks:
        _, *columns = zip(*(row for row in rows if row.network == network))
        histories.append(History(f"network {network}" if len(networks) > 1 else "", *columns))
    step_unit = "step" if trainings == 1 else f"step ({trainings} trainings, one after the other)"
    with _naming("picture", picture, "written", "Make its folder first, or choose another one."):
        draw(picture, path.name if title is None else title, histories, step_unit=step_unit)
    return picture


@contextlib.contextmanager
def _naming(name, path, what, cure):
    """A context whose errors of files say which argument they are about, and what to do."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            error.errno,
            f"For 'plot_scale', the argument '{name}' is {str(path)!r}, which can't be {what}: {error.strerror}. "
            f"{cure}",
        ) from error


def _read(path):
    """Reads the rows of a LossScaleMonitor's CSV file."""
    with _naming("path", path, "read", "Pass the file that LossScaleMonitor(csv=...) writes."):
        text = path.read_text(errors="replace")
    # The last line may be incomplete if the training is still running.
    lines = text[: text.rfind("\n") + 1].splitlines()
    reader = csv.DictReader(lines)
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(
            f"For 'plot_scale', the argument 'path' must be a CSV file of LossScaleMonitor, but {str(path)!r} has "
            f"no columns {', '.join(missing)}."
        )
    rows = []
    for row in reader:
        try:
            rows.append(_row(row))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"For 'plot_scale', line {reader.line_num} of {str(path)!r} was not written by LossScaleMonitor: "
                f"{lines[reader.line_num - 1]!r}. Fix or delete it."
            ) from error
    if not rows:
        raise ValueError(
            f"For 'plot_scale', the file {str(path)!r} has no steps. LossScaleMonitor writes them every "
            f"'every_n_steps' steps and at the end of each epoch."
        )
    if len({len(row.loss_scales) for row in rows}) > 1:
        raise ValueError(
            f"For 'plot_scale', the file {str(path)!r} has steps with different numbers of loss scales: it is of "
            f"different trainings. Give each a file of its own."
        )
    return rows


def _row(row):
    if None in row:
        raise ValueError("more values than columns")
    return _Row(
        int(row["network"]),
        int(row["step"]),
        float(row["loss"]),
        tuple(map(float, row["loss_scale"].split("/"))),
        int(row["skipped"]) > 0,
        int(row["retries"]),
    )


def _one_after_the_other(rows):
    """Numbers the steps of several trainings consecutively. Returns the rows and the number of trainings."""
    before, last, trainings, counted_on = 0, 0, 1, []
    for row in rows:
        if row.step < last:
            before, trainings = before + last, trainings + 1
        last = row.step
        counted_on.append(row._replace(step=before + row.step))
    return counted_on, trainings


def draw(path, title, histories, loss_unit="", step_unit="step"):
    """Draws a list of histories into one picture. The units are those of losses and steps."""
    figure = matplotlib_figure(_WHAT)(figsize=(9, 6.5), dpi=120, layout="constrained")
    figure.suptitle(title)
    loss_axes, scale_axes = figure.subplots(2, sharex=True)
    colors = itertools.cycle(f"C{i}" for i in range(10))
    for history in histories:
        number, loss, scales, skipped, retries = map(np.array, history[1:])
        of_network = f"{history.name}: " if history.name else ""
        window = max(1, min(50, len(number) // 20))
        color = next(colors)
        loss_axes.plot(number, loss, color=color, alpha=0.35, linewidth=0.8, label=f"{of_network}each step")
        mean = running_mean(loss, window)
        of_last = f"mean of the last {counted(window, 'step', 'steps')}"
        loss_axes.plot(number, mean, color=color, label=f"{of_network}{of_last}")
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
        label = f"{label} ({counted(which.sum(), 'step', 'steps')})"
        axes.plot(number[which], values[which], marker, color=color, fillstyle="none", label=label)


def running_mean(values, window):
    """Returns at each place the mean of the last `window` values, without those that are not finite."""
    finite = np.isfinite(values)
    sums, counts = (
        np.convolve(terms, np.ones(window))[: len(values)] for terms in (np.where(finite, values, 0.0), finite)
    )
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
