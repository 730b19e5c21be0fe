"""Steps that the host does not start one by one: loops in a compiled function, and `dataset_sink_mode`."""

import numpy as np
from mindspore import Tensor, jit, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, expect_equal
from ms_lossscale.selfcheck.networks import Linear, regression

STEPS = 6


def _cell():
    network = Linear(np.random.default_rng(0).normal(size=(4, 1)))
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.01)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10, scale_window=4)).set_train()


def _expect_the_same(cell, expected, what):
    values = [parameter.asnumpy().tobytes() for parameter in cell.get_parameters()]
    different = [p.name for p, value in zip(expected.get_parameters(), values) if p.asnumpy().tobytes() != value]
    expect_equal(different, [], f"what differs between {what} and {STEPS} calls")


def _called():
    cell, batch = _cell(), tuple(map(Tensor, regression(0)))
    for _ in range(STEPS):
        cell(*batch)
    return cell


@check()
def a_compiled_for_loop_makes_the_same_steps(device):
    """The cell in a `for` loop of a function under `mindspore.jit` makes the same steps, bit for bit."""
    cell = _cell()

    @jit
    def steps(x, y):
        loss = 0.0
        for _ in range(STEPS):
            loss = cell(x, y)[0]
        return loss

    steps(*map(Tensor, regression(0)))
    _expect_the_same(cell, _called(), "a compiled for loop")


@check()
def a_compiled_while_loop_makes_the_same_steps(device):
    """The cell in a `while` loop of a function under `mindspore.jit` makes the same steps, bit for bit."""
    cell = _cell()

    @jit
    def steps(x, y, count):
        loss = x.sum()
        while count > 0:
            loss = cell(x, y)[0]
            count = count - 1
        return loss

    steps(*map(Tensor, regression(0)), Tensor(STEPS))
    _expect_the_same(cell, _called(), "a compiled while loop")


@check()
def sink_mode_makes_the_same_steps(device):
    """`Model.train` with `dataset_sink_mode=True` makes the same steps, bit for bit."""
    x, y = (np.tile(each, (STEPS, 1)) for each in regression(0))
    cell = _cell()
    batches = NumpySlicesDataset((x, y), shuffle=False).batch(len(x) // STEPS)
    Model(cell).train(1, batches, dataset_sink_mode=True)
    _expect_the_same(cell, _called(), "Model.train in sink mode")
