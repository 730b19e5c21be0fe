"""Whether a checkpoint continues bit for bit."""

import tempfile
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor

from ms_lossscale import DynamicLossScale
from ms_lossscale.selfcheck.claim import check, differing, expect_equal, values
from ms_lossscale.selfcheck.networks import cell_of_linear, regression


def _cell(seed):
    loss_scale = DynamicLossScale(2.0**10, scale_window=2)
    return cell_of_linear(seed, loss_scale, gradient_accumulation_steps=2, clip_norm=1.0, ema_decay=0.9)


def _train(cell, steps):
    for step in steps:
        x, y = regression(step)
        if step == 5:
            x[0, 0] = np.inf
        cell(Tensor(x), Tensor(y))


def _saved(cell):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "cell.ckpt"))
        mindspore.save_checkpoint(cell, path)
        return mindspore.load_checkpoint(path)


def _expect_to_continue(resumed):
    """Expects that a cell goes on as another one does from whose checkpoint it is loaded."""
    cell = _cell(0)
    _train(cell, range(3))
    resumed.load_state_dict(_saved(cell))
    _train(cell, range(3, 10))
    _train(resumed, range(3, 10))
    expect_equal(differing(values(cell), values(resumed)), [], "what differs after seven more calls")


@check()
def a_new_cell_continues_bit_for_bit(device):
    """A checkpoint saved in the middle of an accumulation cycle, loaded into a new cell, continues bit for bit."""
    _expect_to_continue(_cell(1))


@check()
def a_running_cell_continues_bit_for_bit(device):
    """A checkpoint loaded into a cell that has made steps of its own continues bit for bit."""
    running = _cell(1)
    _train(running, range(20, 25))
    _expect_to_continue(running)
