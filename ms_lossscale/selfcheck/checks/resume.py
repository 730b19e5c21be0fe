"""Whether a checkpoint continues bit for bit."""

import tempfile
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, expect_equal
from ms_lossscale.selfcheck.networks import Linear, regression


def _cell(seed):
    network = Linear(np.random.default_rng(seed).normal(size=(4, 1)))
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=nn.ExponentialDecayLR(0.01, 0.9, 4))
    return ScaledTrainOneStepCell(
        network,
        optimizer,
        DynamicLossScale(2.0**10, scale_window=2),
        gradient_accumulation_steps=2,
        clip_norm=1.0,
        ema_decay=0.9,
    ).set_train()


def _train(cell, steps):
    for step in steps:
        x, y = regression(step)
        if step == 5:
            x[0, 0] = np.inf
        cell(Tensor(x), Tensor(y))


def _different(cell, other):
    values = {name: parameter.asnumpy() for name, parameter in other.parameters_dict().items()}
    parameters = cell.parameters_dict().items()
    return [name for name, parameter in parameters if parameter.asnumpy().tobytes() != values[name].tobytes()]


def _saved(cell):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "cell.ckpt"))
        mindspore.save_checkpoint(cell, path)
        return mindspore.load_checkpoint(path)


@check()
def a_new_cell_continues_bit_for_bit(device):
    """A checkpoint saved in the middle of a window, loaded into a new cell, continues bit for bit."""
    cell, resumed = _cell(0), _cell(1)
    _train(cell, range(3))
    resumed.load_state_dict(_saved(cell))
    _train(cell, range(3, 10))
    _train(resumed, range(3, 10))
    expect_equal(_different(resumed, cell), [], "what differs after seven more calls")


@check()
def a_running_cell_continues_bit_for_bit(device):
    """A checkpoint loaded into a cell that has made steps of its own continues bit for bit."""
    cell, running = _cell(0), _cell(1)
    _train(cell, range(3))
    _train(running, range(20, 25))
    running.load_state_dict(_saved(cell))
    _train(cell, range(3, 10))
    _train(running, range(3, 10))
    expect_equal(_different(running, cell), [], "what differs after seven more calls")
