"""A loop of three lines around a ManualStep tries again as a training cell with `max_retries` does."""

import mindspore
import numpy as np
import pytest
from mindspore import nn
from support.retried_networks import LEARNING_RATE, Slope, inputs
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell

RETRIES = 3


def made(make, **keywords):
    network = Slope()
    scale = DynamicLossScale(2.0**15, scale_window=2)
    return network, make(network, nn.SGD([network.weight], LEARNING_RATE), scale, **keywords).set_train()


def without_counters(step):
    return {name: value for name, value in state(step).items() if not name.startswith("step_counters.")}


@pytest.mark.parametrize("how", ["eagerly", "in_jit"])
def test_each_attempt_is_a_step_and_the_first_without_overflow_is_applied(mode, how):
    _, cell = made(ScaledTrainOneStepCell, max_retries=RETRIES)
    network, step = made(ManualStep)
    value_and_grad = step.value_and_grad(network)

    def train_step(x, slope):
        loss, grads = value_and_grad(*step.begin(x, slope))
        return loss, step.end(grads)

    train_step = mindspore.jit(train_step) if how == "in_jit" else train_step
    attempts = 0
    # Clean, two overflows, more than there are attempts, and clean ones by which the scale grows again.
    for slope in (1.0, 8.0, 2.0**14, 2.0**10, 1.0, 1.0, 16.0):
        data = inputs(slope)
        for _ in range(RETRIES + 1):
            attempts += 1
            loss, overflow = train_step(*data)
            if not overflow:
                break
        expected = cell(*data)
        assert bool(overflow) == bool(expected[1])
        np.testing.assert_array_equal(loss.asnumpy(), expected[0].asnumpy())
        assert not changed(*map(without_counters, (cell, step)))
    counts = cell.counters()
    assert counts["skipped_steps"] == 1 and counts["retries"] > 3
    assert step.counters()["applied_steps"] == counts["applied_steps"]
    assert step.counters()["skipped_steps"] == attempts - counts["applied_steps"]
    assert step.counters()["skipped_steps"] == counts["retries"] + counts["skipped_steps"]
