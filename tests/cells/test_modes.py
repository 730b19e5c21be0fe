"""A cell that is called in another mode than that in which it was constructed makes the same steps."""

import mindspore
import pytest
from conftest import MODES, slow
from mindspore import nn
from mindspore.experimental.optim import AdamW
from support.manual_training import batches, dynamic, regression
from support.networks import FEATURES, batch_for
from support.training import cell_of, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


@pytest.fixture(autouse=True)
def _mode_as_before():
    before = mindspore.get_context("mode")
    yield
    mindspore.set_context(mode=before)


def train(constructed, called, optimizer, kind="scaled", **kwargs):
    mindspore.set_context(mode=MODES[constructed])
    networks, kwargs = [regression(1)], {"clip_norm": 1.0, "ema_decay": 0.9, **kwargs}
    if kind != "scaled":
        networks.append(regression(2, "other."))
    optimizers = [optimizer(network.trainable_params()) for network in networks]
    cell = cell_of(kind, networks, optimizers, dynamic(), **kwargs)
    for step, data in enumerate(batches("..x...")):
        mindspore.set_context(mode=MODES[called[step % len(called)]])
        cell(*data)
    cell.flush()
    return state(cell)


OTHERS = [("pynative", "graph", "scaled"), ("pynative", "graph", "simultaneous"), ("graph", "pynative", "alternating")]


@pytest.mark.parametrize(("constructed", "called", "kind"), [("graph", "pynative", "scaled"), *slow(*OTHERS)])
def test_the_same_steps_in_the_other_mode(constructed, called, kind):
    # MindSpore compiles such an optimizer once, for one mode: it can not be called in both in turn.
    assert changed(train(called, [called], AdamW, kind), train(constructed, [called], AdamW, kind)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("constructed", ["graph", "pynative"])
def test_the_same_steps_in_both_modes_in_turn(constructed):
    expected = train(constructed, [constructed], nn.Adam, gradient_accumulation_steps=4)
    values = train(constructed, ["pynative", "graph"], nn.Adam, gradient_accumulation_steps=4)
    assert changed(expected, values) == set()


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
