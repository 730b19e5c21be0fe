"""Losses that depend on a gradient that their forward takes: PyNative mode loses second derivatives, and says so."""

import numpy as np
from mindspore import nn, ops
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


def right_move(x, y):
    """The gradient of the loss after the inner step, by finite differences in float64."""
    x, y = x.asnumpy().astype(np.float64), y.asnumpy()
    start = Adapts().weight.asnumpy().astype(np.float64)

    def parts(weights, x):
        hidden, output = weights[: 5 * FEATURES].reshape(FEATURES, 5), weights[5 * FEATURES :, None]
        values = np.tanh(x @ hidden)
        return output, values, values @ output - y

    def gradient(weights):
        output, values, errors = parts(weights, x)
        by_values = 2 / len(x) * errors @ output.T * (1 - values**2)
        return np.concatenate([(x.T @ by_values).ravel(), (2 / len(x) * values.T @ errors).ravel()])

    def loss(weights):
        return np.square(parts(weights - RATE * gradient(weights), 2 * x)[2]).mean()

    ways = 1e-6 * np.eye(len(start))
    return -RATE * np.array([(loss(start + way) - loss(start - way)) / 2e-6 for way in ways])


def test_input_gradient_of_a_loss_that_takes_the_weights_keeps_them(mode):
    np.testing.assert_allclose(moved(AdaptsByInputGradient(), *batch()), right_move(*batch()), rtol=1e-4, atol=1e-6)
    if mode == "pynative":
        lost = moved(Adapts(), *batch())
        # If this fails, MindSpore has mended its second derivatives.
        assert not np.allclose(lost, right_move(*batch()), rtol=1e-2)
