"""What happened in every step, as a table and as curves."""

from typing import NamedTuple

import numpy as np
from common.output import replacing, running_mean
from matplotlib.figure import Figure


class Step(NamedTuple):
    """One row of the table."""

    step: int
    loss: float
    overflow: bool
    loss_scale: float
    retries: int


def plot(path, steps, title, steps_per_epoch):
    """Draws the loss and the loss scale over the steps, with the steps marked that were skipped or done again."""
    number, loss, overflow, scale, retries = (np.array(column) for column in zip(*steps))
    window = max(1, min(50, len(steps) // 20))
    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    figure.suptitle(title)
    loss_axes, scale_axes = figure.subplots(2, sharex=True)

    loss_axes.plot(number, loss, color="tab:blue", alpha=0.35, linewidth=0.8, label="each step")
    loss_axes.plot(number, running_mean(loss, window), color="tab:blue", label=f"mean of the last {window} steps")
    loss_axes.set_ylim(bottom=0)
    loss_axes.set(title="Training loss", ylabel="cross-entropy (nats)")

    scale_axes.step(number, scale, where="post", color="tab:green", label="loss scale")
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylim(scale.min() / 2, scale.max() * 2)
    scale_axes.set(title="Loss scale", ylabel="loss scale (log2 axis)", xlabel=f"step ({steps_per_epoch} are an epoch)")

    for axes, values in ((loss_axes, loss), (scale_axes, scale)):
        if overflow.any():
            label = f"skipped: gradients overflowed ({overflow.sum()} steps)"
            axes.plot(number[overflow], values[overflow], "x", color="tab:red", label=label)
        again = (retries > 0) & ~overflow
        if again.any():
            label = f"done again at a lower scale ({again.sum()} steps)"
            axes.plot(number[again], values[again], "o", color="tab:purple", fillstyle="none", label=label)
        axes.grid(alpha=0.3)
        axes.legend()
    with replacing(path) as part:
        figure.savefig(part)
