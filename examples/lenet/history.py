"""The steps of a run, as a table and as curves."""

from typing import NamedTuple

from ms_lossscale.plot_scale import draw


class Step(NamedTuple):
    """One row of the table."""

    step: int
    loss: float
    overflow: bool
    loss_scale: float
    retries: int


def plot(path, steps, title, unit, steps_per_epoch):
    """Draws the loss and the loss scale over the steps, each a `unit`, and marks those that were skipped or retried."""
    columns = Step(*zip(*steps))
    scales, reasons = [(scale,) for scale in columns.loss_scale], [()] * len(steps)
    history = columns.step, columns.loss, scales, columns.overflow, columns.retries, reasons
    draw(path, title, {"": history}, "cross-entropy (nats)", f"{unit} ({steps_per_epoch} are an epoch)")
