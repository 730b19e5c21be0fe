"""Unscaling, clipping, accumulation and averages against NumPy in float64."""

import mindspore
import numpy as np
from mindspore import Tensor, nn

from ms_lossscale import FixedLossScale, ScaledTrainOneStepCell
from ms_lossscale._output import written_scale
from ms_lossscale.selfcheck.claim import check, expect
from ms_lossscale.selfcheck.networks import SIZE, Linear, regression

LEARNING_RATE = 0.1
# Each operation in float32 rounds to 2**-24 of values of about 1.
TOLERANCE = 1e-5


def _gradient(weight, x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    return 2 / len(x) * x.T @ (x @ weight - y)


def _cell(loss_scale=2.0**10, **keywords):
    """A training cell, its network, and the network's weight in float64."""
    network = Linear(99)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=LEARNING_RATE)
    cell = ScaledTrainOneStepCell(network, optimizer, FixedLossScale(loss_scale), **keywords).set_train()
    return cell, network, network.weight.asnumpy().astype(np.float64)


def _step(cell, seed):
    cell(*map(Tensor, regression(seed)))


def _expect_close(parameter, expected, what):
    difference = np.abs(parameter.asnumpy() - expected).max()
    expect(difference <= TOLERANCE, f"{what} is off by {difference:.2g}, more than {TOLERANCE:g}, from NumPy's")


@check(quick=True)
def gradients_are_divided_by_the_scale(device):
    """The update does not depend on the loss scale: gradients are divided by it before the optimizer."""
    for loss_scale in (2.0**10, 1000.0):
        cell, network, weight = _cell(loss_scale)
        for seed in range(3):
            _step(cell, seed)
            weight = weight - LEARNING_RATE * _gradient(weight, *regression(seed))
        _expect_close(network.weight, weight, f"the weight at the loss scale {written_scale(loss_scale)}")


@check()
def float16_gradients_are_divided_in_float32(device):
    """float16 gradients are divided in float32: what underflows in float16 without a loss scale is kept."""
    gradient = Tensor(np.full(SIZE, 1e-7 * 2**12), mindspore.float16)
    unscaled = FixedLossScale(2.0**12).unscale((gradient,))[0].asnumpy()
    expected = np.float16(1e-7 * 2**12).astype(np.float64) / 2**12
    expect(
        unscaled.dtype == np.float32 and np.allclose(unscaled, expected, rtol=1e-6, atol=0),
        f"a float16 gradient of {expected:.6g} times 4096 was unscaled to {unscaled[0]:.6g} in {unscaled.dtype}",
    )


@check()
def clipping_takes_the_norm_of_unscaled_gradients(device):
    """With clip_norm the unscaled gradients are clipped by their global norm, as in NumPy."""
    cell, network, weight = _cell(clip_norm=0.5)
    for seed in range(3):
        _step(cell, seed)
        gradient = _gradient(weight, *regression(seed))
        norm = np.linalg.norm(gradient)
        expect(abs(cell.grad_norm() - norm) <= TOLERANCE * norm, f"the norm is {cell.grad_norm()} and not {norm}")
        weight = weight - LEARNING_RATE * gradient * min(1.0, 0.5 / norm)
    _expect_close(network.weight, weight, "the weight")


@check()
def accumulated_gradients_are_averaged(device):
    """With accumulation the update is that of the mean of the cycle's gradients, and comes at its last call."""
    cell, network, weight = _cell(gradient_accumulation_steps=3)
    for cycle in range(2):
        seeds = range(3 * cycle, 3 * cycle + 3)
        for seed in seeds:
            _expect_close(network.weight, weight, "the weight within an accumulation cycle")
            _step(cell, seed)
        weight = weight - LEARNING_RATE * np.mean([_gradient(weight, *regression(seed)) for seed in seeds], axis=0)
    _expect_close(network.weight, weight, "the weight")


@check()
def averages_follow_the_weights(device):
    """The moving average begins at the first weights and moves by the decay after each update."""
    cell, network, average = _cell(ema_decay=0.75)
    for seed in range(3):
        _step(cell, seed)
        average = 0.75 * average + 0.25 * network.weight.asnumpy()
    _expect_close(cell.ema_parameters()["weight"], average, "the average")
