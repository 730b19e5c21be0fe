"""A cell that is called in another mode than that in which it was constructed makes the same steps."""

import functools

import mindspore
import pytest
from conftest import MODES
from mindspore import nn
from mindspore.experimental.optim import AdamW
from support.linear_pair import Trained
from support.networks import FEATURES, batch_for
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


@pytest.fixture(autouse=True)
def _mode_as_before():
    before = mindspore.get_context("mode")
    yield
    mindspore.set_context(mode=before)


def train(constructed, called, optimizer, **kwargs):
    mindspore.set_context(mode=MODES[constructed])
    mindspore.set_seed(1)
    network = nn.SequentialCell(nn.Dense(FEATURES, 4), nn.BatchNorm1d(4), nn.Dense(4, 1))
    cell = ScaledTrainOneStepCell(
        nn.WithLossCell(network, nn.MSELoss()),
        optimizer(network.trainable_params()),
        DynamicLossScale(2.0**10, scale_window=2),
        clip_norm=1.0,
        ema_decay=0.9,
        **kwargs,
    ).set_train()
    for step in range(6):
        mindspore.set_context(mode=MODES[called[step % len(called)]])
        cell(*batch_for(step == 2, step))
    cell.flush()
    return state(cell)


@functools.cache
def trained_in(mode, optimizer, steps):
    """Of a cell that is constructed and called in one mode."""
    return train(mode, [mode], optimizer, gradient_accumulation_steps=steps)


@pytest.mark.parametrize("optimizer, steps", [(nn.Adam, 4), (AdamW, 1)])
@pytest.mark.parametrize(("constructed", "called"), [("graph", "pynative"), ("pynative", "graph")])
def test_the_same_steps_in_the_other_mode(optimizer, steps, constructed, called):
    values = train(constructed, [called], optimizer, gradient_accumulation_steps=steps)
    assert changed(trained_in(called, optimizer, steps), values) == set()


@pytest.mark.parametrize("constructed", MODES)
def test_the_same_steps_in_both_modes_in_turn(constructed):
    values = train(constructed, ["pynative", "graph"], nn.Adam, gradient_accumulation_steps=4)
    assert changed(trained_in(constructed, nn.Adam, 4), values) == set()


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
@pytest.mark.parametrize(("constructed", "called"), [("graph", "pynative"), ("pynative", "graph")])
def test_each_cell_in_the_other_mode(kind, constructed, called):
    mindspore.set_context(mode=MODES[constructed])
    trained = Trained(kind)
    mindspore.set_context(mode=MODES[called])
    for seed in range(3):
        trained.call(seed, (seed == 1, False))
