"""A ManualStep warns once if it divides gradients by a loss scale by which no loss was multiplied."""

import warnings

import mindspore
import pytest
from conftest import in_pairs, quick_in_pynative_mode
from mindspore import nn
from support.manual_training import batch, manual, regression

from ms_lossscale import DynamicLossScale, FixedLossScale, ManualStep

SAYS = "has gone through 'value_and_grad' or 'scale' before the first 'end'"


def dynamic():
    return DynamicLossScale(2.0**10)


def said(train_step, calls=3):
    """Returns what the package warns of in so many calls, and asserts that it points to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(calls):
            train_step(*batch(seed))
    caught = [each for each in caught if SAYS in str(each.message)]
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def train_step_of(step, networks, factors, how):
    """Returns a function that makes one call: the loss of network `i` is multiplied as `factors[i]` says."""

    def forward_of(network, factor):
        def forward(x, y):
            return factor(network(x, y))

        return forward

    weights = step.parameters if isinstance(step.parameters[0], tuple) else (step.parameters,)
    gradients = [
        mindspore.grad(forward_of(network, factor), None, its)
        for network, factor, its in zip(networks, factors, weights)
    ]
    first, last = gradients[0], gradients[-1]

    if len(gradients) == 1:

        def train_step(x, y):
            x, y = step.begin(x, y)
            return step.end(first(x, y))

    else:

        def train_step(x, y):
            x, y = step.begin(x, y)
            return step.end(first(x, y), last(x, y))

    return mindspore.jit(train_step) if how == "in_jit" else train_step


def as_it_is(loss):
    return loss


@in_pairs
class TestWhatWarns:
    def test_a_loss_that_is_not_scaled(self, mode, how):
        # Twice, since graph mode may remember what it called as it compiled the first.
        for _ in range(2):
            network = regression()
            step = ManualStep(network, nn.SGD(network.trainable_params()), dynamic()).set_train()
            (message,) = said(train_step_of(step, [network], [as_it_is], how))
            assert "For 'ManualStep', no loss has" in message
            assert "step.value_and_grad(forward)," in message

    def test_a_loss_that_is_scaled(self, mode, how):
        for _ in range(2):
            step, _, train_step = manual(dynamic(), how)
            assert said(train_step) == []
            assert step.counters()["applied_steps"] == 3

    @pytest.mark.parametrize("loss_scale", [None, 1.0])
    def test_without_a_scale(self, mode, how, loss_scale):
        network = regression()
        step = ManualStep(network, nn.SGD(network.trainable_params()), loss_scale).set_train()
        assert said(train_step_of(step, [network], [as_it_is], how)) == []


@quick_in_pynative_mode
def test_a_forward_that_is_compiled_alone(mode):
    network = regression()
    step = ManualStep(network, nn.SGD(network.trainable_params()), FixedLossScale(8.0)).set_train()

    @mindspore.jit
    def forward(x, y):
        return step.scale(network(x, y))

    gradient = mindspore.grad(forward, None, step.parameters)

    def train_step(x, y):
        x, y = step.begin(x, y)
        return step.end(gradient(x, y))

    assert said(train_step) == []
