"""The steps of a run, as a table and as curves."""

from typing import NamedTuple

from ms_lossscale.plot_scale import History, draw


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
    scales = [(scale,) for scale in columns.loss_scale]
    history = History("", columns.step, columns.loss, scales, columns.overflow, columns.retries)
    draw(path, title, [history], "cross-entropy (nats)", f"{unit} ({steps_per_epoch} are an epoch)")
