"""Which cells need float32: with planted causes, so that it is known which."""

import itertools

import mindspore
import numpy as np
import pytest
from conftest import MODES, nightly, quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, amp, nn, ops
from mindspore import dtype as mstype
from support import planted_networks as networks
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, advise_float32, locate_overflow, profile_activations

CAUSES = {
    "softmax": networks.SoftmaxByHand,
    "a norm": networks.RootMeanSquare,
    "a long sum": networks.LongSum,
    "logits in a construct": networks.Attention,
    "the backward only": networks.SmallInBetween,
}


def blocks(*middles):
    return nn.SequentialCell(*(networks.Block(each) for each in middles))


def training_cell(network, level="O3", loss=None, loss_scale=None):
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=1e-6, momentum=0.9)
    if level is not None:
        network = amp.auto_mixed_precision(network, level)
    return ScaledTrainOneStepCell(
        nn.WithLossCell(network, loss or nn.MSELoss()), optimizer, loss_scale or DynamicLossScale(1.0, 2.0, 1000)
    ).set_train()


OF_PRECISION = ("fp16", "fp32", "bf16", "mixed_precision_type", "_cell_init_args", "amp_strategy", "construct", "dtype")


def settings(cell):
    """What the cells inside keep of the precision that they compute in, and their names."""
    return {
        name: (type(each), dict(each.get_flags()), [(key, vars(each).get(key)) for key in OF_PRECISION])
        for name, each in cell.cells_and_names()
    }


def overflows(cell, loss_scale, inputs):
    cell.set_loss_scale(loss_scale)
    return bool(cell(*inputs)[1])


def check_trains(cell, advice, inputs):
    """The cell overflows at every scale before the advice is applied, and at none up to the advised one after."""
    assert all(overflows(cell, scale, inputs) for scale in (1.0, advice.loss_scale))
    advice.apply()
    assert not overflows(cell, 1.0, inputs)
    # The weights hardly move.
    assert not overflows(cell, advice.loss_scale, inputs)
    assert overflows(cell, advice.loss_scale * 2, inputs)


@quick_in_pynative_mode
def test_the_cells_that_overflow_are_found_nothing_changes_and_then_it_trains(mode):
    cell = training_cell(blocks(networks.SoftmaxByHand(), nn.ReLU(), networks.SmallInBetween()))
    inputs = networks.batch()
    assert overflows(cell, 1.0, inputs)
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
    check_trains(cell, advice, inputs)


@pytest.mark.slow
def test_the_lines_do_the_same(capsys):
    def network():
        mindspore.set_seed(0)
        return nn.WithLossCell(amp.auto_mixed_precision(blocks(networks.Attention()), "O3"), nn.MSELoss())

    asked = network()
    advice = advise_float32(asked, asked.trainable_params(), [networks.batch()])
    print(advice)
    printed = capsys.readouterr().out
    assert "_backbone._backbone.0.middle" in printed and "Attention" in printed
    lines = printed[printed.index("import mindspore") :]
    pasted = network()
    exec(lines, {"network": pasted})
    again = advise_float32(pasted, None, [networks.batch()])
    assert (again.cells, again.holds, again.loss_scale) == ([], True, advice.loss_scale)


class LogOfZero(nn.Cell):
    def construct(self, x):
        return ops.log(x * 0)


@pytest.mark.parametrize("network_and_input", ["NaN in the data", "log of zero"])
def test_float32_that_does_not_help_is_said(network_and_input):
    x, y = (each.asnumpy() for each in networks.batch())
    middle = nn.ReLU()
    if network_and_input == "NaN in the data":
        x[2, 1] = np.nan
    else:
        middle = LogOfZero()
    network = nn.WithLossCell(blocks(middle).to_float(mstype.float16), nn.MSELoss())
    advice = advise_float32(network, None, [(x, y)])
    assert (advice.cells, advice.holds, advice.loss_scale) == ([], False, None)
    assert "float32 does not help" in str(advice)
    if network_and_input == "NaN in the data":
        assert "The batch itself holds values that are not finite" in str(advice)
    else:
        assert advice.trace.cell == "_backbone.0.middle" and "the first overflow" in str(advice).lower()


def test_an_operator_that_takes_no_two_dtypes():
    network = networks.CastsByHand()
    advice = advise_float32(network, None, [(Tensor(np.full((4, networks.N), 3.0), mstype.float32),)])
    assert (advice.cells, advice.holds) == ([""], True)
    assert "large's output is inf" in str(advice)


# Each cause, each level and each mode. Level auto computes all but the logits in float32 already.
LEVELS = [
    ("graph", "softmax", "O2"),
    ("pynative", "a norm", "O3"),
    ("graph", "a long sum", "by hand"),
    ("pynative", "logits in a construct", "auto"),
    ("graph", "the backward only", "O3"),
]
FURTHER_LEVELS = [
    each
    for each in itertools.product(MODES, CAUSES, ("O2", "O3", "auto", "by hand"))
    if each not in LEVELS and (each[2] != "auto" or each[1] == "logits in a construct")
]


@pytest.mark.parametrize(("mode", "cause", "level"), [*slow(*LEVELS), *nightly(*FURTHER_LEVELS)], indirect=["mode"])
def test_each_cause(mode, cause, level):
    network = blocks(nn.ReLU(), CAUSES[cause](), nn.ReLU())
    prefix = "_backbone." + ("_backbone." if level in ("O2", "O3") else "")
    if level == "by hand":
        network.to_float(mstype.float16)
    cell = training_cell(network, None if level == "by hand" else level)
    inputs = networks.batch()
    advice = advise_float32(cell, [inputs])
    assert (advice.cells, advice.holds) == ([f"{prefix}1.middle"], True)
    if cause == "a norm":
        # It trains without, but on zeros.
        assert "its output is zero" in str(advice)
        assert not overflows(cell, 1.0, inputs)
        advice.apply()
        assert not overflows(cell, advice.loss_scale, inputs)
    else:
        check_trains(cell, advice, inputs)


class Large(nn.Cell):
    """A product that is too large, of an operator that O1 casts, in a CellList."""

    def __init__(self):
        super().__init__()
        weight = Tensor(np.full((networks.N, networks.N), 1e5), mstype.float32)
        large = nn.Dense(networks.N, networks.N, weight_init=weight)
        self.layers = nn.CellList([large, networks.dense()])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x) * 1e-5
        return x


class CastsByHand(nn.Cell):
    """Its cast stays in graph mode, whatever its precision. In PyNative mode MindSpore casts back to that."""

    def construct(self, x):
        e = ops.exp(x.astype(mstype.float16) * 5.0)
        return (e / e.sum(-1, keepdims=True)).astype(mstype.float32)


@quick_in_graph_mode
@pytest.mark.parametrize("to_float", [False, *slow(True)])
def test_casts_in_a_construct_can_not_be_switched_in_graph_mode_and_it_is_said(mode, to_float):
    network = blocks(CastsByHand())
    if to_float:
        network.to_float(mstype.float16)
    advice = advise_float32(training_cell(network, None), [networks.batch()])
    assert (advice.cells, advice.holds) == (["_backbone.0.middle"], True)
    said = "This was tried in PyNative mode. Casts that are written in a construct, such as x.astype(mstype.float16), "
    assert (said in str(advice)) == (mode == "graph")


class LargeByHand(nn.Cell):
    def construct(self, x):
        return (x.astype(mstype.float16) * 1e5).astype(mstype.float32)


def test_a_network_in_which_no_cell_is_cast():
    network = nn.WithLossCell(nn.SequentialCell(networks.dense(), LargeByHand()), nn.MSELoss())
    advice = advise_float32(network, None, [networks.batch()])
    assert (advice.cells, advice.holds, advice.trace.cell) == ([], False, "_backbone.1")
    assert "No cell is cast by to_float or mindspore.amp, so that none could be switched. Casts that" in str(advice)


def test_weights_that_are_not_finite_are_named():
    network = nn.WithLossCell(blocks(nn.Tanh()).to_float(mstype.float16), nn.MSELoss())
    weight = network.trainable_params()[0]
    ops.assign(weight, Tensor(np.full(weight.shape, np.nan, np.float32)))
    advice = advise_float32(network, None, [networks.batch()])
    assert (advice.holds, advice.not_finite_weights) == (False, {weight.name: weight.size})
    assert str(advice).count("Weights themselves are infinite or NaN") == 1


class WithoutFurtherLayers(networks.SoftmaxByHand):
    """It overflows, and holds empty containers of cells, which are false."""

    def __init__(self):
        super().__init__()
        self.further, self.by_name, self.shortcut = nn.CellList([]), nn.CellDict(), nn.SequentialCell()

    def construct(self, x):
        for layer in self.further:
            x = layer(x)
        return super().construct(self.shortcut(x))


def test_empty_containers_of_cells():
    cell = training_cell(blocks(WithoutFurtherLayers()))
    assert locate_overflow(cell, networks.batch(), loss_scale=1.0).cell == "_backbone._backbone.0.middle"
    assert profile_activations(cell, [networks.batch()]).first is not None
    advice = advise_float32(cell, [networks.batch()])
    assert (advice.cells, advice.holds) == (["_backbone._backbone.0.middle"], True)


@pytest.mark.slow
def test_one_object_in_two_places():
    softmax = networks.SoftmaxByHand()
    cell = training_cell(blocks(softmax, nn.ReLU(), softmax))
    inputs = networks.batch()
    advice = advise_float32(cell, [inputs])
    assert (advice.cells, advice.holds) == (["_backbone._backbone.0.middle"], True)
    check_trains(cell, advice, inputs)


@pytest.mark.slow
def test_what_amp_has_rewritten():
    network = Large()
    cell = training_cell(network, "O1")
    inputs = networks.batch()
    before = settings(cell)
    advice = advise_float32(cell, [inputs])
    assert (advice.cells, advice.holds) == (["_backbone.layers.0"], True)
    assert settings(cell) == before
    check_trains(cell, advice, inputs)

    # The lines are for before it is rewritten.
    assert "before amp.auto_mixed_precision rewrites" in str(advice)
    plain = Large()
    cells = dict(nn.WithLossCell(plain, nn.MSELoss()).cells_and_names())
    cells[advice.cells[0]].to_float(mstype.float32)
    rewritten = nn.WithLossCell(amp.auto_mixed_precision(plain, "O1"), nn.MSELoss())
    assert advise_float32(rewritten, None, [inputs]).cells == []


@pytest.mark.slow
def test_what_the_forward_writes_counts():
    network = nn.WithLossCell(blocks(nn.ReLU(), networks.WritesSquares()).to_float(mstype.float16), nn.MSELoss())
    advice = advise_float32(network, None, [networks.batch()])
    assert (advice.cells, advice.holds) == (["_backbone.1.middle"], True)
    assert "1.middle.seen, which it writes, is not finite" in str(advice)
