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


@check()
def a_checkpoint_continues_bit_for_bit(device):
    """A checkpoint from within an accumulation cycle continues bit for bit, in a new cell and in a running one."""
    cell, new, running = _cell(0), _cell(1), _cell(2)
    _train(running, range(20, 25))
    _train(cell, range(3))
    saved = _saved(cell)
    _train(cell, range(3, 10))
    for resumed, which in ((new, "a new cell"), (running, "one that has made steps of its own")):
        resumed.load_state_dict(saved)
        _train(resumed, range(3, 10))
        expect_equal(differing(values(cell), values(resumed)), [], f"what differs after seven more calls of {which}")
