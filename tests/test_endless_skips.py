"""A training that only skips says so, once, without a monitor."""

import warnings

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.linear_pair import Trained
from support.networks import Linear, batch, batch_for

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


def linear():
    network = Linear()
    optimizer = nn.SGD([network.weight], 0.01)
    return network, ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10)).set_train()


def test_weights_that_are_nan(mode):
    network, cell = linear()
    ops.assign(network.weight, Tensor(np.full(network.weight.shape, np.nan, np.float32)))
    inputs = batch(0)
    message = r"the last 499 steps were all skipped, down to a loss scale of 1, .*: the gradients of weight are not"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        for _ in range(1100):
            cell(*inputs)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_training_that_recovers_says_nothing(mode):
    _, cell = linear()
    good, bad = batch(0), batch_for(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(510):
            cell(*(good if i in (100, 450) else bad))


def test_one_of_several_networks(mode):
    trained = Trained("alternating")
    ops.assign(trained.weights[1], Tensor(np.full(trained.weights[1].shape, np.nan, np.float32)))
    with pytest.warns(RuntimeWarning, match="gradients of second.weight are not finite"):
        for _ in range(501):
            trained.call_cell(0)
