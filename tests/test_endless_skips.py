"""A training that only skips says so, once, without a monitor."""

import warnings

import numpy as np
import pytest
from conftest import MODES, quick_in_graph_mode
from mindspore import Tensor, nn, ops
from support.in_mode import in_mode
from support.linear_pair import Trained
from support.networks import Linear, batch, batch_for
from test_accumulation import Saturating, saturating_batch
from test_overflow_in_the_forward import BehindStopGradient, overflowing

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, emulation
from ms_lossscale.cells import endless_skips


@pytest.fixture
def few(monkeypatch):
    """It looks at every 8th call, and 5 skips are endless."""
    monkeypatch.setattr(endless_skips, "_CALLS", 8)
    monkeypatch.setattr(endless_skips, "_SKIPS", 5)


def linear():
    network = Linear()
    optimizer = nn.SGD([network.weight], 0.01)
    return network, ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10)).set_train()


def check_weights_that_are_nan(calls):
    network, cell = linear()
    ops.assign(network.weight, Tensor(np.full(network.weight.shape, np.nan, np.float32)))
    inputs = batch(0)
    message = f"the last {calls - 1} steps were all skipped, now at a loss scale of .*: the gradients of weight are not"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        for _ in range(2 * calls + 1):
            cell(*inputs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return str(caught[0].message)


@quick_in_graph_mode
def test_weights_that_are_nan(mode, few):
    assert "at a loss scale of 8," in check_weights_that_are_nan(8)


@pytest.mark.long
def test_with_500_calls():
    with in_mode(MODES["graph"]):
        assert "at a loss scale of 1," in check_weights_that_are_nan(500)


@quick_in_graph_mode
def test_what_the_forward_writes(mode, few):
    network = BehindStopGradient()
    optimizer = nn.SGD(network.score.trainable_params(), 0.01)
    cell = ScaledTrainOneStepCell(network, optimizer, 128.0).set_train()
    inputs = overflowing()
    with pytest.warns(RuntimeWarning, match="now at a loss scale of 128, ") as caught:
        for _ in range(9):
            cell(*inputs)
    (message,) = [str(each.message) for each in caught]
    assert (
        "all gradients are finite, but what the forward writes (generator.1.moving_mean, generator.1.moving_variance) "
        "became not finite, or the overflow detector reports"
    ) in message
    assert "locate_overflow" not in message


def test_the_status_register(mode, few):
    with emulation.saturation_mode():
        network = Saturating("only")
        cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), 128.0).set_train()
        inputs = saturating_batch(True, 0)
        with pytest.warns(RuntimeWarning, match="all gradients are finite, but the overflow detector reports"):
            for _ in range(9):
                cell(*inputs)


@quick_in_graph_mode
def test_a_training_that_recovers_says_nothing(mode, few):
    _, cell = linear()
    good, bad = batch(0), batch_for(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(17):
            cell(*(good if i in (4, 12) else bad))


@quick_in_graph_mode
def test_one_of_several_networks(mode, few):
    trained = Trained("alternating")
    ops.assign(trained.weights[1], Tensor(np.full(trained.weights[1].shape, np.nan, np.float32)))
    with pytest.warns(RuntimeWarning, match="gradients of second.weight are not finite"):
        for _ in range(9):
            trained.call_cell(0)
