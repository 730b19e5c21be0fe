"""Retries: that nothing of an attempt is left, how often a detector is asked, and what is refused."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.retried_networks import LEARNING_RATE, HalvesItsInput, Penalised, Slope, inputs
from support.training import changed, same_bits, state

from ms_lossscale import (
    DynamicLossScale,
    ScaledTrainOneStepCell,
)


def sgd(network):
    return nn.SGD([network.weight], LEARNING_RATE)


@pytest.mark.slow
@quick_in_pynative_mode
@pytest.mark.parametrize("aux, steps", [*slow((False, 1)), (True, 2)])
def test_a_retried_step_is_the_step_at_the_lower_scale(mode, aux, steps):
    """Bit for bit: weights, optimizer, BatchNorm, a user's own state, averages, losses and aux."""
    cells = []
    for scale in (2.0**15, 2.0**10):
        network = WithAux() if aux else Slope()
        optimizer = nn.Adam([network.weight], 0.01)
        loss_scale = DynamicLossScale(scale, scale_window=100)
        keywords = {"max_retries": 8, "ema_decay": 0.5, "clip_norm": 1.0, "has_aux": aux}
        cell = ScaledTrainOneStepCell(network, optimizer, loss_scale, gradient_accumulation_steps=steps, **keywords)
        cells.append(cell.set_train())
    for seed in range(4):
        outputs = [cell(*inputs(63.0, seed=seed)) for cell in cells]
        for one, other in zip(*map(flat, outputs)):
            assert same_bits(one, other)
    retried, plain = map(state, cells)
    assert changed(retried, plain) == {"step_counters.retries"}
    assert cells[0].counters()["retries"] == 5


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode refuses to differentiate such a network.
def test_each_try_sees_the_inputs_of_the_call(mode):
    network = HalvesItsInput()
    cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.5), DynamicLossScale(2.0**15), max_retries=4)
    cell.set_train()
    _, overflow, loss_scale = cell(Tensor(np.full(3, 40.0, np.float32)))
    assert (bool(overflow.asnumpy()), float(loss_scale.asnumpy()), cell.counters()["retries"]) == (False, 2.0**11, 4)
    np.testing.assert_array_equal(network.weight.asnumpy(), np.full(3, 1.0 - 0.5 * 20.0, np.float32))


class WithAux(Slope):
    def construct(self, x, slope):
        return super().construct(x, slope), self.weight, x, slope


class Drawn(Slope):
    """Draws a factor in each run, which its loss, its gradient and its aux show."""

    def __init__(self):
        super().__init__()
        self.draw = ops.UniformReal()

    def construct(self, x, slope):
        factor = self.draw((3,)) + 1.0
        product = self.weight.astype(mstype.float16) * slope.astype(mstype.float16)
        return (product.astype(mstype.float32) * factor).sum(), factor


@quick_in_graph_mode
def test_the_loss_and_aux_are_those_of_the_attempt_that_is_applied(mode):
    network = Drawn()
    cell = ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale(2.0**15), max_retries=8, has_aux=True)
    loss, _, _, (factor,) = cell.set_train()(*inputs(4.0))
    assert cell.counters()["retries"] > 0
    moved = (1.0 - network.weight.asnumpy()) / LEARNING_RATE
    # float16 rounds the product of scale and factor by 2**-11; the weight's own rounding is divided by the step.
    np.testing.assert_allclose(moved, 4.0 * factor.asnumpy(), rtol=2.0**-10)
    np.testing.assert_allclose(loss.asnumpy(), 4.0 * factor.asnumpy().sum(), rtol=1e-6)


def flat(values):
    if isinstance(values, tuple):
        return [each for value in values for each in flat(value)]
    return [values.asnumpy()]


def test_without_retries_there_are_three_counters():
    network = Slope()
    assert "retries" not in ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale()).counters()


@quick_in_pynative_mode
@pytest.mark.parametrize("shares", [True, False])
def test_a_loss_that_the_scale_makes_infinite_is_tried_again(mode, shares):
    scale = DynamicLossScale(2.0**15)
    network = Penalised(scale if shares else 2.0**15)
    cell = ScaledTrainOneStepCell(network, sgd(network.inner), scale, max_retries=5).set_train()
    loss, overflow, used = cell(*inputs(1.0))
    if shares:
        assert np.isfinite(loss.asnumpy()) and not overflow.asnumpy()
        assert float(used.asnumpy()) == 2.0**11
        assert cell.counters() == {"applied_steps": 1, "skipped_steps": 0, "consecutive_skipped_steps": 0, "retries": 4}
    else:
        assert overflow.asnumpy() and not np.isfinite(loss.asnumpy())
        assert cell.counters()["retries"] == 0
