"""build_train_network: MindSpore's conversions to mixed precision, with our cell around them."""

import inspect

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow_in_graph_mode, slow_in_pynative_mode
from mindspore import Parameter, Tensor, amp, nn
from mindspore import dtype as mstype
from mindspore.experimental import optim
from support.networks import FEATURES, batch_for

from ms_lossscale import DynamicLossScale, FixedLossScale, ScaledTrainOneStepCell, build_train_network

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
        self.backbone = Backbone()
        self.loss = nn.MSELoss()

    def construct(self, x, y):
        return self.loss(self.backbone(x).astype(mstype.float32), y)


def inputs(step=0, overflow=False):
    return batch_for(overflow, seed=step)


def sgd(network):
    return nn.SGD(network.trainable_params(), learning_rate=0.01)


@slow_in_graph_mode
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("with_loss_fn", [True, False], ids=["loss_fn", "loss_in_network"])
def test_converts_as_mindspore_does(mode, level, with_loss_fn):
    def build(function):
        network = Backbone() if with_loss_fn else BackboneWithLoss()
        loss_fn = nn.MSELoss() if with_loss_fn else None
        # No scale, which MindSpore's own function has on CPU for all levels.
        return function(network, sgd(network), loss_fn, level=level, loss_scale_manager=None)

    ours, stock = build(build_train_network), build(amp.build_train_network)
    assert isinstance(ours, ScaledTrainOneStepCell)
    assert type(stock) is nn.TrainOneStepCell
    for step in range(2):
        loss, overflow, loss_scale = ours(*inputs(step))
        expected = stock(*inputs(step))
        assert (bool(overflow), float(loss_scale)) == (False, 1.0)
        assert loss.dtype == expected.dtype
        np.testing.assert_array_equal(loss.asnumpy(), expected.asnumpy())


class TestLossScale:
    @pytest.mark.parametrize("level, expected", [("O0", 1.0), ("O1", 1.0), ("O2", 2.0**24), ("O3", 1.0), ("auto", 1.0)])
    def test_as_in_mindspore_o2_brings_a_dynamic_one_and_the_others_none(self, level, expected):
        network = Backbone()
        cell = build_train_network(network, sgd(network), nn.MSELoss(), level)
        assert cell.get_loss_scale() == expected
        assert isinstance(cell.loss_scale, DynamicLossScale) == (level == "O2")
        assert isinstance(cell.loss_scale, FixedLossScale) == (level != "O2")

    @pytest.mark.slow
    def test_a_dynamic_manager_which_mindspore_refuses_on_cpu(self, mode):
        network = Backbone()
        manager = amp.DynamicLossScaleManager(init_loss_scale=512, scale_factor=2, scale_window=2)
        with pytest.raises(ValueError, match="CPU"):
            amp.build_train_network(network, sgd(network), nn.MSELoss(), "O0", loss_scale_manager=manager)
        cell = build_train_network(network, sgd(network), nn.MSELoss(), "O0", loss_scale_manager=manager)
        reported = [cell(*inputs(overflow=overflow))[1:] for overflow in (0, 0, 1, 0)]
        assert [bool(overflow) for overflow, _ in reported] == [False, False, True, False]
        assert [float(scale) for _, scale in reported] == [512.0, 512.0, 1024.0, 512.0]

    @pytest.mark.parametrize(
        "manager, expected",
        [
            (lambda: amp.FixedLossScaleManager(256), 256.0),
            (lambda: FixedLossScale(64.0), 64.0),
            (lambda: 32, 32.0),
            (lambda: None, 1.0),
        ],
        ids=["manager", "ours", "number", "None"],
    )
    def test_in_any_form(self, manager, expected):
        network = Backbone()
        cell = build_train_network(network, sgd(network), nn.MSELoss(), "O2", loss_scale_manager=manager())
        assert cell.get_loss_scale() == expected


class TestOtherKeywords:
    @pytest.mark.slow
    def test_are_those_of_mindspore(self):
        ours = inspect.signature(build_train_network).parameters
        stock = inspect.signature(amp.build_train_network).parameters
        assert list(ours) == list(stock)
        assert [parameter.default for parameter in ours.values()] == [p.default for p in stock.values()]

    @slow_in_pynative_mode
    @pytest.mark.parametrize("level, keep", [("O2", True), ("O2", False), ("O3", True), ("O3", False)])
    def test_keep_batchnorm_fp32(self, mode, level, keep):
        def build(function):
            network = Backbone()
            keywords = {"loss_scale_manager": None, "keep_batchnorm_fp32": keep}
            return function(network, sgd(network), nn.MSELoss(), level, **keywords)

        expected = build(amp.build_train_network)(*inputs())
        np.testing.assert_array_equal(build(build_train_network)(*inputs())[0].asnumpy(), expected.asnumpy())

    @slow_in_pynative_mode
    @pytest.mark.parametrize("level, cast", [("O0", mstype.float16), ("O3", mstype.float32)])
    def test_cast_model_type(self, mode, level, cast):
        def build(function):
            network = Backbone()
            keywords = {"loss_scale_manager": None, "cast_model_type": cast}
            return function(network, sgd(network), nn.MSELoss(), level, **keywords)

        expected = build(amp.build_train_network)(*inputs())
        np.testing.assert_array_equal(build(build_train_network)(*inputs())[0].asnumpy(), expected.asnumpy())

    @quick_in_graph_mode
    def test_those_of_the_training_cell(self, mode):
        network = BackboneWithLoss()
        counts = CountsUpdates()
        cell = build_train_network(network, sgd(network), level="O3", loss_scale_manager=8.0, after_update=counts)
        for overflow in (0, 1, 0):
            assert bool(cell(*inputs(overflow=overflow))[1]) == bool(overflow)
        assert int(counts.updates.asnumpy()) == 2

    @pytest.mark.slow
    def test_an_optimizer_that_mindspore_refuses(self, mode):
        network = Backbone()
        optimizer = optim.AdamW(network.trainable_params(), lr=0.01)
        with pytest.raises(TypeError):
            amp.build_train_network(network, optimizer, nn.MSELoss(), "O0")
        cell = build_train_network(network, optimizer, nn.MSELoss(), "O0", loss_scale_manager=1024)
        before = network.output.weight.asnumpy().copy()
        assert not bool(cell(*inputs())[1])
        assert not np.array_equal(network.output.weight.asnumpy(), before)


class CountsUpdates(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.updates = Parameter(Tensor(0, mstype.int32), name="counts.updates", requires_grad=False)

    def construct(self):
        self.updates = self.updates + 1
