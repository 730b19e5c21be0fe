"""Losses that depend on a gradient that their forward takes: PyNative mode loses second derivatives, and says so."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import ParameterTuple, nn, ops
from support.in_mode import in_mode
from support.networks import FEATURES, Linear, batch, overflowing_batch, weight

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    InputGradient,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)

LOSES = "takes a gradient in its forward, and MindSpore's PyNative mode loses the gradients of that gradient"
RATE = 0.1


class LossOf(nn.Cell):
    """The squared error of two layers whose weights are an input, as one vector."""

    def construct(self, weights, x, y):
        hidden = ops.tanh(ops.matmul(x, weights[: 5 * FEATURES].reshape(FEATURES, 5)))
        return ops.square(ops.matmul(hidden, weights[5 * FEATURES :].reshape(5, 1)) - y).mean()


class Adapts(nn.Cell):
    """The loss after one step of gradient descent, as in MAML."""

    def __init__(self, name="weight"):
        super().__init__()
        self.weight = weight(5 * FEATURES + 5, name=name)
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


class FirstOrder(Adapts):
    def gradient_at(self, x, y):
        return ops.stop_gradient(self.gradient(self.loss)(self.weight, x, y))


class Sharpness(Adapts):
    """Sharpness-aware minimization: the loss where the weight has moved uphill."""

    def construct(self, x, y):
        step = RATE * ops.grad(self.loss)(self.weight, x, y)
        ops.assign_add(self.weight, step)
        loss = self.loss(self.weight, x, y)
        ops.assign_sub(self.weight, step)
        return loss


class NoPenaltyYet(Adapts):
    """A penalty of the gradient by a factor that is still zero."""

    def construct(self, x, y):
        penalty = ops.square(self.gradient_at(x, y)).sum()
        return self.loss(self.weight, x, y) + 0.0 * ops.clip_by_value(penalty, 0.0, 1.0)


def cell_of(network, **keywords):
    optimizer = nn.SGD(network.trainable_params(), RATE)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()


def of_the_loss(records):
    return [str(record.message) for record in records if LOSES in str(record.message)]


def moved(network, x, y, **keywords):
    """Returns how much a step has moved the weight."""
    before = network.weight.asnumpy().copy()
    assert not bool(cell_of(network, **keywords)(x, y)[1])
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


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", [{}, *slow({"max_retries": 1}, {"gradient_accumulation_steps": 2})])
def test_a_warning_comes_once_and_in_pynative_mode_only(mode, keywords):
    network = Adapts()
    cell = cell_of(network, **keywords)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for seed in range(3):
            cell(*batch(seed))
    warned = of_the_loss(records)
    assert len(warned) == (mode == "pynative")
    for each in warned:
        assert each.startswith(f"For 'ScaledTrainOneStepCell', 'Adapts' {LOSES}") and "InputGradient" in each
    assert all(record.filename == __file__ for record in records if LOSES in str(record.message))


@quick_in_pynative_mode
@pytest.mark.parametrize("cell_class", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])
def test_it_names_which_of_several_networks(mode, cell_class):
    networks = [Linear(), Adapts("other")]
    cell = cell_class(networks, [nn.SGD(network.trainable_params(), RATE) for network in networks])
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        cell(*batch())
    assert [f"network 1 ('Adapts') {LOSES}" in each for each in of_the_loss(records)] == [True] * (mode == "pynative")


@pytest.mark.parametrize("network", [FirstOrder, Sharpness, NoPenaltyYet, AdaptsByInputGradient])
def test_no_warning_without_a_second_derivative_that_is_lost(network):
    with in_mode(mindspore.PYNATIVE_MODE), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        cell = cell_of(network())
        for seed in range(2):
            cell(*batch(seed))
        assert cell.counters()["applied_steps"] == 2
        if network is not NoPenaltyYet:  # Zero times infinity is NaN.
            cell(*overflowing_batch(2))
    assert not of_the_loss(records)


def test_noticing_changes_no_bit():
    with in_mode(mindspore.PYNATIVE_MODE):
        network = Adapts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            noticed = moved(network, *batch())
        network, (x, y) = Adapts(), batch()
        before = network.weight.asnumpy().copy()
        loss_and_grads = ops.value_and_grad(network, None, ParameterTuple([network.weight]))
        nn.SGD(network.trainable_params(), RATE)(loss_and_grads(x, y)[1])
        np.testing.assert_array_equal(noticed, network.weight.asnumpy() - before)


def test_input_gradient_of_a_loss_that_takes_the_weights_keeps_them(mode):
    np.testing.assert_allclose(moved(AdaptsByInputGradient(), *batch()), right_move(*batch()), rtol=1e-4, atol=1e-6)
    if mode == "pynative":
        with pytest.warns(RuntimeWarning, match=LOSES):
            lost = moved(Adapts(), *batch())
        # If this fails, MindSpore has mended its second derivatives, and no warning is needed.
        assert not np.allclose(lost, right_move(*batch()), rtol=1e-2)
