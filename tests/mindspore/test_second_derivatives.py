"""Losses that depend on a gradient that their forward takes: PyNative mode loses second derivatives, and says so."""

import mindspore
import numpy as np
from conftest import quick_in_pynative_mode
from mindspore import nn, ops
from support.in_mode import in_mode
from support.networks import FEATURES, batch, weight

from ms_lossscale import DynamicLossScale, InputGradient, ScaledTrainOneStepCell

RATE = 0.1


class LossOf(nn.Cell):
    """The squared error of two layers whose weights are an input, as one vector."""

    def construct(self, weights, x, y):
        hidden = ops.tanh(ops.matmul(x, weights[: 5 * FEATURES].reshape(FEATURES, 5)))
        return ops.square(ops.matmul(hidden, weights[5 * FEATURES :].reshape(5, 1)) - y).mean()


class Adapts(nn.Cell):
    """The loss after one step of gradient descent, as in MAML."""

    def __init__(self):
        super().__init__()
        self.weight = weight(5 * FEATURES + 5, name="weight")
        self.loss, self.gradient = LossOf(), ops.GradOperation()

    def gradient_at(self, x, y):
        return self.gradient(self.loss)(self.weight, x, y)

    def construct(self, x, y):
        return self.loss(self.weight - RATE * self.gradient_at(x, y), 2 * x, y)


class AdaptsByInputGradient(Adapts):
    def __init__(self):
        super().__init__()
        self.gradient = InputGradient(self.loss)

    def gradient_at(self, x, y):
        return self.gradient(self.weight, x, y)


def moved(network, x, y):
    """Returns how much a step has moved the weight."""
    before = network.weight.asnumpy().copy()
    cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], RATE), DynamicLossScale(2.0**10)).set_train()
    assert not bool(cell(x, y)[1])
    return network.weight.asnumpy() - before


@quick_in_pynative_mode
def test_input_gradient_of_a_loss_that_takes_the_weights_keeps_them(mode):
    with in_mode(mindspore.GRAPH_MODE):
        expected = moved(Adapts(), *batch())
    np.testing.assert_allclose(moved(AdaptsByInputGradient(), *batch()), expected, rtol=1e-4, atol=1e-6)
    if mode == "pynative":
        # If this fails, MindSpore has mended its second derivatives.
        assert not np.allclose(moved(Adapts(), *batch()), expected, rtol=1e-2)
