"""Which cells need float32: with planted causes, so that it is known which."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, amp, nn, ops
from mindspore import dtype as mstype
from support import planted_networks as networks
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, advise_float32


def blocks(*middles):
    return nn.SequentialCell(*(networks.Block(each) for each in middles))


def training_cell(network, level="O3"):
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=1e-6, momentum=0.9)
    if level is not None:
        network = amp.auto_mixed_precision(network, level)
    loss = nn.WithLossCell(network, nn.MSELoss())
    return ScaledTrainOneStepCell(loss, optimizer, DynamicLossScale(1.0, 2.0, 1000)).set_train()


OF_PRECISION = ("fp16", "fp32", "bf16", "mixed_precision_type", "_cell_init_args", "amp_strategy", "construct", "dtype")


def settings(cell):
    """What the cells inside keep of the precision that they compute in, and their names."""
    return {
        name: (type(each), dict(each.get_flags()), [(key, vars(each).get(key)) for key in OF_PRECISION])
        for name, each in cell.cells_and_names()
    }


def check_trains(cell, advice, inputs):
    """The cell overflows at every scale before the advice is applied, and at none up to the advised one after."""

    def overflows(loss_scale):
        cell.set_loss_scale(loss_scale)
        return bool(cell(*inputs)[1])

    assert overflows(1.0) and overflows(advice.loss_scale)
    advice.apply()
    # The weights hardly move.
    assert [overflows(scale * advice.loss_scale) for scale in (1.0 / advice.loss_scale, 1.0, 2.0)] == [0, 0, 1]


CAST_WITHIN = (
    "This was tried in PyNative mode. Casts that are written in a construct, such as x.astype(mstype.float16), "
)


@quick_in_pynative_mode
def test_the_cells_that_overflow_are_found_nothing_changes_and_then_it_trains(mode):
    cell = training_cell(blocks(networks.SoftmaxByHand(), nn.ReLU(), networks.SmallInBetween()))
    inputs = networks.batch()
    before, attributes, rng = state(cell), settings(cell), mindspore.get_rng_state()
    advice = advise_float32(cell, [inputs, networks.batch(1)])
    assert advice.cells == ["_backbone._backbone.0.middle", "_backbone._backbone.2.middle"]
    assert advice.holds
    assert all(name in dict(cell.network.cells_and_names()) for name in advice.cells)
    assert [need.trace.direction for need in advice.needs] == ["forward", "backward"]
    assert [need.kind for need in advice.needs] == ["SoftmaxByHand", "SmallInBetween"]
    assert not changed(before, state(cell))
    assert settings(cell) == attributes
    assert np.array_equal(mindspore.get_rng_state().asnumpy(), rng.asnumpy())
    assert (CAST_WITHIN in str(advice)) == (mode == "graph")
    check_trains(cell, advice, inputs)


class Large(nn.Cell):
    """A product that is too large, of an operator that O1 casts, in a CellList."""

    def __init__(self):
        super().__init__()
        weight = Tensor(np.full((networks.N, networks.N), 1e5), mstype.float32)
        self.layers = nn.CellList([nn.Dense(networks.N, networks.N, weight_init=weight), networks.dense()])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x) * 1e-5
        return x


def between(cause):
    return lambda: blocks(nn.ReLU(), cause(), nn.ReLU())


def one_object_in_two_places():
    softmax = networks.SoftmaxByHand()
    return blocks(nn.ReLU(), softmax, softmax)


# Level auto computes all but the logits in float32 already.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "make", "level", "name"),
    [
        ("graph", between(networks.SoftmaxByHand), "O2", "1.middle"),
        ("graph", between(networks.SoftmaxByHand), "by hand", "1.middle"),
        ("pynative", between(networks.Attention), "auto", "1.middle"),
        ("graph", between(networks.SmallInBetween), "O3", "1.middle"),
        ("pynative", one_object_in_two_places, "O3", "1.middle"),
        ("pynative", Large, "O1", "layers.0"),
    ],
    indirect=["mode"],
)
def test_each_cause(mode, make, level, name):
    network = make()
    if level == "by hand":
        network.to_float(mstype.float16)
    cell, inputs = training_cell(network, None if level == "by hand" else level), networks.batch()
    before = settings(cell)
    advice = advise_float32(cell, [inputs])
    name = f"_backbone.{'_backbone.' if level in ('O2', 'O3') else ''}{name}"
    assert (advice.cells, advice.holds) == ([name], True)
    assert settings(cell) == before
    assert ("before amp.auto_mixed_precision rewrites" in str(advice)) == (level == "O1")
    check_trains(cell, advice, inputs)


LOG_OF_ZERO = networks.Function(lambda x: ops.log(x * 0))
LARGE_BY_HAND = networks.Function(lambda x: (x.astype(mstype.float16) * 1e5).astype(mstype.float32))


class EmptyContainers(networks.SoftmaxByHand):
    """It overflows, and holds empty containers of cells, which are false."""

    def __init__(self):
        super().__init__()
        self.further, self.by_name, self.shortcut = nn.CellList([]), nn.CellDict(), nn.SequentialCell()

    def construct(self, x):
        for layer in self.further:
            x = layer(x)
        return super().construct(self.shortcut(x))


def half(middle):
    return nn.WithLossCell(blocks(middle).to_float(mstype.float16), nn.MSELoss())


def with_nan_weights():
    network = half(nn.Tanh())
    weight = network.trainable_params()[0]
    ops.assign(weight, Tensor(np.full(weight.shape, np.nan, np.float32)))
    return network


X, Y = (each.asnumpy() for each in networks.batch())
NAN = np.where(np.arange(X.size).reshape(X.shape) == 9, np.float32(np.nan), X)
THREES = Tensor(np.full((4, networks.N), 3.0), mstype.float32)
# The network, its batch, the cells that need float32, whether that suffices, and what is said.
ADVICE = {
    "nothing": (lambda: half(nn.ReLU()), (X, Y), [], True, "No cell needs float32"),
    "NaN in the data": (lambda: half(nn.ReLU()), (NAN, Y), [], False, "The batch itself holds values that are not fi"),
    "log of zero": (lambda: half(LOG_OF_ZERO), (X, Y), [], False, "float32 does not help"),
    "NaN weights": (with_nan_weights, (X, Y), [], False, "Weights themselves are infinite or NaN"),
    "no cell is cast": (
        lambda: nn.WithLossCell(nn.SequentialCell(networks.dense(), LARGE_BY_HAND), nn.MSELoss()),
        (X, Y), [], False, "No cell is cast by to_float or mindspore.amp, so that none could be switched. Casts that",
    ),
    "no two dtypes": (networks.CastsByHand, (THREES,), [""], True, "large's output is inf"),
    "zeros": (lambda: half(networks.RootMeanSquare()), (X, Y), ["_backbone.0.middle"], True, "its output is zero"),
    "empty": (lambda: half(EmptyContainers()), (X, Y), ["_backbone.0.middle"], True, "EmptyContainers"),
    "state": (
        lambda: half(networks.WritesSquares()), (X, Y), ["_backbone.0.middle"], True,
        "0.middle.seen, which it writes, is inf",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*(name for name in ADVICE if name != "zeros"), *slow("zeros")])
def test_what_is_said(name):
    make, batch, cells, holds, words = ADVICE[name]
    advice = advise_float32(make(), [batch])
    assert (advice.cells, advice.holds, advice.loss_scale is None) == (cells, holds, not holds)
    assert str(advice).count(words) == 1
    if name == "log of zero":
        assert advice.trace.cell == "_backbone.0.middle" and "the first overflow" in str(advice).lower()


class CastsByHand(nn.Cell):
    """Its cast stays in graph mode, whatever its precision. In PyNative mode MindSpore casts back to that."""

    def construct(self, x):
        e = ops.exp(x.astype(mstype.float16) * 5.0)
        return (e / e.sum(-1, keepdims=True)).astype(mstype.float32)


@quick_in_graph_mode
def test_casts_in_a_construct_can_not_be_switched_in_graph_mode_and_it_is_said(mode):
    advice = advise_float32(training_cell(blocks(CastsByHand()), None), [networks.batch()])
    assert (advice.cells, advice.holds) == (["_backbone.0.middle"], True)
    assert (CAST_WITHIN in str(advice)) == (mode == "graph")


def test_a_loss_scale_at_which_the_batches_must_be_finite():
    network = half(nn.ReLU())
    advice = advise_float32(network, [(X, Y)])
    assert advice.cells == []
    assert advise_float32(network, [(X, Y)], loss_scale=advice.loss_scale).cells == []
    beyond = advise_float32(network, [(X, Y)], loss_scale=2 * advice.loss_scale)
    assert beyond.holds and len(beyond.cells) > 0
    assert beyond.loss_scale > advice.loss_scale
