"""A cell that is called in another mode than that in which it was constructed makes the same steps."""

import mindspore
import pytest
from conftest import MODES, slow
from mindspore import nn
from mindspore.experimental.optim import AdamW
from support.linear_pair import Trained
from support.manual_training import batches, dynamic, regression
from support.networks import FEATURES, batch_for
from support.training import cell_of, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


@pytest.fixture(autouse=True)
def _mode_as_before():
    before = mindspore.get_context("mode")
    yield
    mindspore.set_context(mode=before)


def train(constructed, called, optimizer, **kwargs):
    mindspore.set_context(mode=MODES[constructed])
    network, kwargs = regression(1), {"clip_norm": 1.0, "ema_decay": 0.9, **kwargs}
    cell = cell_of("scaled", [network], [optimizer(network.trainable_params())], dynamic(), **kwargs)
    for step, data in enumerate(batches("..x...")):
        mindspore.set_context(mode=MODES[called[step % len(called)]])
        cell(*data)
    cell.flush()
    return state(cell)


@pytest.mark.parametrize(("constructed", "called"), [("graph", "pynative"), *slow(("pynative", "graph"))])
def test_the_same_steps_in_the_other_mode(constructed, called):
    # MindSpore compiles such an optimizer once, for one mode: it can not be called in both in turn.
    assert changed(train(called, [called], AdamW), train(constructed, [called], AdamW)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("constructed", ["graph", "pynative"])
def test_the_same_steps_in_both_modes_in_turn(constructed):
    expected = train(constructed, [constructed], nn.Adam, gradient_accumulation_steps=4)
    values = train(constructed, ["pynative", "graph"], nn.Adam, gradient_accumulation_steps=4)
    assert changed(expected, values) == set()


@pytest.mark.parametrize("kind", slow("simultaneous", "alternating"))
@pytest.mark.parametrize(("constructed", "called"), [("graph", "pynative"), ("pynative", "graph")])
def test_each_cell_in_the_other_mode(kind, constructed, called):
    cells = []
    for mode in (constructed, called):
        mindspore.set_context(mode=MODES[mode])
        cells.append(Trained(kind))
    for seed in range(3):
        for its in cells:
            its.call_cell(seed, (seed == 1, False))
    assert not changed(*(state(its.cell) for its in cells))


@pytest.mark.slow
def test_a_network_that_is_evaluated_between_steps_trains_as_one_that_is_not(mode):
    cells = []
    for is_evaluated in (True, False):
        mindspore.set_seed(0)
        net = nn.Dense(FEATURES, 1)
        network = nn.WithLossCell(net, nn.MSELoss())
        cell = ScaledTrainOneStepCell(network, nn.Momentum(net.trainable_params(), 0.1, 0.9), DynamicLossScale(2.0**10))
        for seed in range(3):
            cell(*batch_for(False, seed))
            if is_evaluated:
                net.set_train(False)
                net(batch_for(False, seed)[0])
                net.set_train(True)
        cells.append(cell)
    assert not changed(*map(state, cells))
