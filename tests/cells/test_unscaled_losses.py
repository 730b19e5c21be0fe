"""A ManualStep warns once if it divides gradients by a loss scale by which no loss was multiplied."""

import warnings

import mindspore
from conftest import in_pairs, quick_in_pynative_mode
from mindspore import nn
from support.manual_training import batch, manual, regression

from ms_lossscale import DynamicLossScale, FixedLossScale, ManualStep

SAYS = "has gone through 'value_and_grad' or 'scale' before the first 'end'"


def said(train_step, calls=3):
    """Returns what the package warns of in so many calls, which points to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(calls):
            train_step(*batch(seed))
    caught = [each for each in caught if SAYS in str(each.message)]
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def unscaled(loss_scale, how):
    """Returns a function that makes a step whose loss is not scaled."""
    network = regression()
    step = ManualStep(network, nn.SGD(network.trainable_params()), loss_scale).set_train()
    gradient = mindspore.grad(network, None, step.parameters)

    def train_step(x, y):
        x, y = step.begin(x, y)
        return step.end(gradient(x, y))

    return mindspore.jit(train_step) if how == "in_jit" else train_step


@in_pairs
def test_what_warns(mode, how):
    # In graph mode twice, since it may remember what it called as it compiled the first.
    for _ in range(1 + (mode == "graph")):
        (message,) = said(unscaled(DynamicLossScale(2.0**10), how))
        assert "For 'ManualStep', no loss has" in message
        assert "step.value_and_grad(forward)," in message
        step, _, train_step = manual(DynamicLossScale(2.0**10), how)
        assert said(train_step) == []
        assert step.counters()["applied_steps"] == 3
    for loss_scale in (None, 1.0):
        assert said(unscaled(loss_scale, how)) == []


@quick_in_pynative_mode
def test_a_forward_that_is_compiled_alone(mode):
    network = regression()
    step = ManualStep(network, nn.SGD(network.trainable_params()), FixedLossScale(8.0)).set_train()

    @mindspore.jit
    def forward(x, y):
        return step.scale(network(x, y))

    gradient = mindspore.grad(forward, None, step.parameters)
    assert said(lambda x, y: step.end(gradient(*step.begin(x, y)))) == []
