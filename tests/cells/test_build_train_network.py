"""build_train_network: MindSpore's conversions to mixed precision, with our cell around them."""

import inspect

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow_in_graph_mode, slow_in_pynative_mode
from mindspore import Tensor, amp, nn
from mindspore import dtype as mstype
from mindspore.experimental import optim
from support.networks import FEATURES, batch, batch_for

from ms_lossscale import DynamicLossScale, FixedLossScale, ScaledTrainOneStepCell, build_train_network

BOTH = build_train_network, amp.build_train_network
LEVELS = ["O0", "O1", "O2", "O3", "auto"]


class Backbone(nn.Cell):
    """A network whose answer depends on the level: with a layer that computes in float16, and BatchNorm."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        first, second = (Tensor(rng.normal(size=shape).astype(np.float32)) for shape in ((4, FEATURES), (1, 4)))
        self.dense = nn.Dense(FEATURES, 4, weight_init=first, bias_init="zeros")
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Dense(4, 1, weight_init=second, bias_init="zeros")

    def construct(self, x):
        return self.output(self.norm(self.dense(x)))


class BackboneWithLoss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.backbone, self.loss = Backbone(), nn.MSELoss()

    def construct(self, x, y):
        return self.loss(self.backbone(x).astype(mstype.float32), y)


def sgd(network):
    return nn.SGD(network.trainable_params(), learning_rate=0.01)


def built(function=build_train_network, network=None, optimizer=None, level="O0", **keywords):
    network = network or Backbone()
    loss_fn = None if isinstance(network, BackboneWithLoss) else nn.MSELoss()
    return function(network, optimizer or sgd(network), loss_fn, level, **keywords)


def assert_converted_alike(steps=2, make=Backbone, **keywords):
    # No scale, which MindSpore's own function has on CPU for all levels.
    ours, stock = (built(each, make(), loss_scale_manager=None, **keywords) for each in BOTH)
    assert (type(ours), type(stock)) == (ScaledTrainOneStepCell, nn.TrainOneStepCell)
    for step in range(steps):
        loss, overflow, loss_scale = ours(*batch(step))
        expected = stock(*batch(step))
        assert (bool(overflow), float(loss_scale), loss.dtype) == (False, 1.0, expected.dtype)
        np.testing.assert_array_equal(loss.asnumpy(), expected.asnumpy())


@slow_in_graph_mode
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [Backbone, BackboneWithLoss])
def test_converts_as_mindspore_does(mode, level, make):
    assert_converted_alike(level=level, make=make)


@slow_in_pynative_mode
@pytest.mark.parametrize(
    "level, keywords",
    [
        *((level, {"keep_batchnorm_fp32": keep}) for level in ("O2", "O3") for keep in (True, False)),
        *(("O0", {"cast_model_type": mstype.float16}), ("O3", {"cast_model_type": mstype.float32})),
    ],
)
def test_converts_as_mindspore_does_with_its_keywords(mode, level, keywords):
    assert_converted_alike(steps=1, level=level, **keywords)


@pytest.mark.parametrize("level", LEVELS)
def test_as_in_mindspore_o2_brings_a_dynamic_loss_scale_and_the_others_none(level):
    cell = built(level=level)
    assert cell.get_loss_scale() == (2.0**24 if level == "O2" else 1.0)
    assert type(cell.loss_scale) is (DynamicLossScale if level == "O2" else FixedLossScale)


def test_a_loss_scale_in_any_form():
    of_mindspore = amp.FixedLossScaleManager(256)
    for manager, expected in ((of_mindspore, 256.0), (FixedLossScale(64.0), 64.0), (32, 32.0), (None, 1.0)):
        assert built(level="O2", loss_scale_manager=manager).get_loss_scale() == expected


@pytest.mark.slow
def test_its_keywords_are_those_of_mindspore():
    ours, stock = (inspect.signature(each).parameters for each in BOTH)
    assert list(ours) == list(stock)
    assert [parameter.default for parameter in ours.values()] == [p.default for p in stock.values()]


@quick_in_graph_mode
def test_keywords_of_the_training_cell(mode):
    cell = built(network=BackboneWithLoss(), level="O3", loss_scale_manager=8.0, clip_norm=float("inf"))
    for overflow in (False, True, False):
        assert bool(cell(*batch_for(overflow))[1]) == overflow == (not np.isfinite(cell.grad_norm()))


@pytest.mark.slow
def test_an_optimizer_that_mindspore_refuses(mode):
    network = Backbone()
    optimizer = optim.AdamW(network.trainable_params(), lr=0.01)
    with pytest.raises(TypeError):
        built(amp.build_train_network, network, optimizer)
    cell = built(build_train_network, network, optimizer, loss_scale_manager=1024)
    before = network.output.weight.asnumpy().copy()
    assert not bool(cell(*batch())[1])
    assert not np.array_equal(network.output.weight.asnumpy(), before)
