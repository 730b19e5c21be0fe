"""The record of a run: a table of every step, its curves, and the digits that were drawn."""

from typing import NamedTuple

import numpy as np
from common.output import counted, replacing
from matplotlib import image as png
from matplotlib.figure import Figure

from ms_lossscale.plot_scale import running_mean


class Step(NamedTuple):
    """
    One row of the table. With --update simultaneous, both networks have the same overflow, retries and, without
    --separate-scales, loss scale. In a step that a network does not train in, see --n-critic, its loss is the last one.
    """

    step: int
    discriminator_loss: float
    generator_loss: float
    discriminator_overflow: bool
    generator_overflow: bool
    discriminator_loss_scale: float
    generator_loss_scale: float
    discriminator_retries: int
    generator_retries: int


def plot(path, steps, title, loss_unit, steps_per_epoch, *, separate_scales, separate_steps):
    """
    Draws losses and scales over the steps, and marks those that were skipped or retried.

    Args:
        path (Path): The PNG.
        steps (list[Step]): What to draw.
        title (str): The title.
        loss_unit (str): The unit of the losses.
        steps_per_epoch (int): The number of steps in an epoch.
        separate_scales (bool): Whether each network has its own loss scale.
        separate_steps (bool): Whether one network's step can be skipped without the other's.
    """
    columns = Step(*(np.array(column) for column in zip(*steps)))
    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    figure.suptitle(title)
    loss_axes, scale_axes = figure.subplots(2, sharex=True)
    _plot_losses(loss_axes, columns, loss_unit)
    _plot_scales(scale_axes, columns, separate_scales, separate_steps)
    scale_axes.set_xlabel(f"step ({steps_per_epoch} are an epoch)")
    for axes in (loss_axes, scale_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    with replacing(path) as part:
        figure.savefig(part)


def _plot_losses(axes, columns, unit):
    window = max(1, min(100, len(columns.step) // 20))
    losses = {"discriminator": columns.discriminator_loss, "generator": columns.generator_loss}
    for (name, loss), color in zip(losses.items(), ("tab:blue", "tab:orange")):
        axes.plot(columns.step, loss, color=color, alpha=0.25, linewidth=0.6)
        axes.plot(columns.step, running_mean(loss, window), color=color, label=name)
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses.values()])
    # A few huge losses at the beginning must not flatten the rest. Only a critic's losses are below 0.
    low, high = np.quantile(finite, (0.005, 0.995)) if len(finite) else (0.0, 0.0)
    axes.set_ylim(min(0.0, 1.2 * low), max(1.0, 1.2 * high))
    axes.set(title=f"Losses: each step, and the mean of the last {window}", ylabel=unit)


def _plot_scales(axes, columns, separate_scales, separate_steps):
    discriminator = (columns.discriminator_loss_scale, columns.discriminator_overflow, columns.discriminator_retries)
    generator = (columns.generator_loss_scale, columns.generator_overflow, columns.generator_retries)
    if separate_scales:
        curves = [("discriminator", *discriminator, "tab:blue", "x"), ("generator", *generator, "tab:orange", "+")]
    else:
        curves = [("both networks", *discriminator, "tab:green", "x")]
    for name, scale, overflow, retries, color, mark in curves:
        axes.step(columns.step, scale, where="post", color=color, label=f"{name}: loss scale")
        if overflow.any():
            whose = name if separate_steps else "both networks"
            label = f"{whose}: skipped, as gradients overflowed ({counted(overflow.sum(), 'step', 'steps')})"
            if label in axes.get_legend_handles_labels()[1]:
                label = None
            axes.plot(columns.step[overflow], scale[overflow], mark, color="tab:red", markersize=8, label=label)
        again = (retries > 0) & ~overflow
        if again.any():
            whose = name if separate_steps else "both networks"
            label = f"{whose}: done again at a lower scale ({counted(again.sum(), 'step', 'steps')})"
            if label in axes.get_legend_handles_labels()[1]:
                label = None
            axes.plot(columns.step[again], scale[again], "o", color="tab:purple", fillstyle="none", label=label)
    scales = np.concatenate([columns.discriminator_loss_scale, columns.generator_loss_scale])
    axes.set_yscale("log", base=2)
    axes.set_ylim(scales.min() / 2, scales.max() * 2)
    axes.set(title="Loss scale", ylabel="loss scale (log2 axis)")


def save_grid(path, images, zoom=2):
    """Saves images from -1 to 1, of shape (N * N, 1, height, width), as N rows of N, each pixel `zoom` wide."""
    side = int(len(images) ** 0.5)
    height, width = images.shape[2:]
    grid = images.reshape(side, side, height, width).transpose(0, 2, 1, 3).reshape(side * height, side * width)
    grid = np.kron(np.nan_to_num(grid), np.ones((zoom, zoom)))
    with replacing(path) as part:
        png.imsave(part, grid, cmap="gray", vmin=-1, vmax=1)
