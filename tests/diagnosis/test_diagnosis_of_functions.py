"""The diagnoses of functions, such as those that are differentiated around a ManualStep."""

import functools

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import Linear, batch

from ms_lossscale import (
    DynamicLossScale,
    ManualStep,
    ScaledTrainOneStepCell,
    advise_float32,
    locate_overflow,
    profile_activations,
    profile_gradients,
)


class Block(nn.Cell):
    """A Dense whose output leaves float16's range for large inputs, and a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 2, weight_init=Tensor(np.float32([[1.0, 2.0], [1.5, -0.5]])), has_bias=False)
        self.norm = nn.LayerNorm((2,))

    def construct(self, x):
        return self.norm(self.dense(x))


def inputs(size):
    return np.full((4, 2), size, np.float32), np.ones((4, 2), np.float32)


def is_lost(trace):
    """Whether a value is, that float32 does not hold."""
    return trace.found and trace.tensor.non_finite > 0


def made(kind):
    """A float16 network, a ManualStep, and a function of this kind, or a Cell that computes the same."""
    network, loss_fn = Block().to_float(mstype.float16), nn.MSELoss()
    step = ManualStep(network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(2.0**10))

    def plain(x, y):
        return loss_fn(network(x).astype(mstype.float32), y)

    def scaled(x, y):
        return step.scale(plain(x, y))

    def with_aux(x, y):
        loss = plain(x, y)
        return step.scale(loss), loss

    class Loss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.network = network

        def construct(self, x, y):
            return ops.square(self.network(x).astype(mstype.float32) - y).mean()

    cell = Loss() if kind == "cell" else None
    functions = {"plain": plain, "scaled": scaled, "with_aux": with_aux, "jit": mindspore.jit(scaled), "cell": cell}
    return network, step, functions[kind]


FUNCTIONS = ["with_aux", *slow("plain", "scaled", "jit")]


@quick_in_graph_mode
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_scale_within_the_function_does_not_count(mode, kind):
    _, step, function = made(kind)
    network, _, cell = made("cell")
    ordinary = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32), np.ones((4, 2), np.float32)
    report = profile_gradients(function, step.parameters, [ordinary])
    expected = profile_gradients(cell, network.trainable_params(), [ordinary])
    assert list(report.parameters) == ["dense.weight", "norm.gamma", "norm.beta"]
    assert report.recommended_loss_scale == expected.recommended_loss_scale
    assert [str(each.shares()) for each in report.parameters.values()] == [
        str(each.shares()) for each in expected.parameters.values()
    ]
    assert profile_gradients(function, batches=[ordinary]).recommended_loss_scale == report.recommended_loss_scale
    places = [str(its.place) for its in profile_activations(function, [ordinary]).activations if its.kind == "output"]
    assert places[:3] == ["network.dense", "network.norm", "network"]
    trace = locate_overflow(function, inputs(4e4), loss_scale=2.0)
    assert (trace.cell, trace.direction, trace.kind, trace.loss_scale) == ("network.dense", "forward", "inf", 2.0)
    assert not locate_overflow(function, inputs(1.0), loss_scale=2.0).found
    assert step.get_loss_scale() == 2.0**10
    assert step.counters()["applied_steps"] == 0


@quick_in_pynative_mode
def test_looking_in_between_begin_and_end_changes_nothing(mode):
    network = Linear()
    step = ManualStep(network, nn.SGD([network.weight], 0.1), DynamicLossScale(2.0**10))

    def forward(x, y):
        return step.scale(network(x, y))

    weight = network.weight.asnumpy().copy()
    x, y = step.begin(*batch(0))
    assert not locate_overflow(forward, (x, y), loss_scale=2.0**10).found
    step.end(mindspore.grad(forward, None, step.parameters)(x, y))
    x, y = (each.asnumpy() for each in batch(0))
    # float32 rounds by 2**-24 a few times; another scale is off by factors.
    expected = weight - 0.1 * 2 / len(x) * x.T @ (x @ weight - y)
    np.testing.assert_allclose(network.weight.asnumpy(), expected, rtol=1e-6)


@quick_in_graph_mode
def test_which_cells_need_float32(mode):
    network, step, function = made("with_aux")
    advice = advise_float32(function, step.parameters, [inputs(4e4)])
    assert (advice.cells, advice.holds) == (["network.dense", "network.norm"], True)
    assert "network.dense      Dense  forward: its output is inf" in str(advice)
    of_cell, _, cell = made("cell")
    assert advice.loss_scale == advise_float32(cell, of_cell.trainable_params(), [inputs(4e4)]).loss_scale
    # What it says to do works.
    exec(advice.lines(), {"network": network})
    assert not is_lost(locate_overflow(function, inputs(4e4), loss_scale=1.0))
    network, step, function = made("with_aux")
    advise_float32(function, step.parameters, [inputs(4e4)]).apply()
    assert not is_lost(locate_overflow(function, inputs(4e4), loss_scale=1.0))


def test_what_a_function_computes_itself():
    network = nn.Dense(2, 2, weight_init="ones", has_bias=False).to_float(mstype.float16)

    def forward(x):
        hidden = network(x)
        return (hidden * hidden).astype(mstype.float32).mean()

    advice = advise_float32(forward, network.trainable_params(), [np.full((4, 2), 1e3, np.float32)])
    # The function casts nothing, so that float32 in the cell suffices.
    assert (advice.cells, advice.holds) == (["network"], True)

    def forward_of_float16(x):
        return network(x * 1e4).astype(mstype.float32).mean()

    advice = advise_float32(forward_of_float16, network.trainable_params(), [np.full((4, 2), 1e3, np.float16)])
    assert (advice.cells, advice.holds) == ([""], True)
    assert "# in forward_of_float16, for what it computes itself" in str(advice)
    with pytest.raises(RuntimeError, match=r"'apply\(\)' can't change the code of the function 'forward_of_float16'"):
        advice.apply()


def test_a_function_in_a_training_cell():
    network, _, _ = made("cell")

    def forward(x, y):
        return ops.square(network(x).astype(mstype.float32) - y).mean()

    cell = ScaledTrainOneStepCell(forward, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale())
    assert locate_overflow(cell, inputs(4e4), loss_scale=1.0).cell == "network.dense"
    advice = advise_float32(cell, [inputs(4e4)])
    assert advice.cells == ["network.dense", "network.norm"]
    exec(advice.lines(), {"cell": cell})
    assert not is_lost(locate_overflow(cell, inputs(4e4), loss_scale=1.0))


def test_the_parameters_of_several_optimizers():
    networks = [Linear(), Linear(seed=1)]
    networks[1].weight.name = "second.weight"
    step = ManualStep(networks, [nn.SGD([its.weight], 0.1) for its in networks], DynamicLossScale())

    def forward(x, y):
        return step.scale(networks[0](x, y) + networks[1](x, y))

    report = profile_gradients(forward, step.parameters, [batch(0)])
    assert list(report.parameters) == ["weight", "second.weight"]


def linear(name):
    network = Linear()
    network.weight.name = name
    return network


GLOBAL = linear("global")


def of_global(x, y):
    return GLOBAL(x, y)


class Trainer:
    def __init__(self):
        self.networks = [linear("0"), linear("1")]
        self.parts = {"last": linear("2")}

    def forward(self, x, y):
        return self.networks[0](x, y) + self.networks[1](x, y) + self.parts["last"](x, y)


def named_cells():
    """From a kind to a function, the names of the cells that it uses, and its own."""
    closure, other = linear("closure"), linear("other")

    def of_closure(x, y):
        return closure(x, y)

    def of_default(x, y, network=other):
        return network(x, y)

    def of_another_function(x, y):
        return of_closure(x, y) + of_default(x, y)

    def bound(network, x, y):
        return network(x, y)

    return {
        "global": (of_global, ["GLOBAL"], "of_global"),
        "closure": (of_closure, ["closure"], "of_closure"),
        "default": (of_default, ["network"], "of_default"),
        "functions": (of_another_function, ["closure", "network"], "of_another_function"),
        "partial": (functools.partial(bound, other), ["network"], "bound"),
        "method": (Trainer().forward, ["self.networks.0", "self.networks.1", "self.parts.last"], "forward"),
        "jit": (mindspore.jit(of_closure), ["closure"], "of_closure"),
    }


@pytest.mark.parametrize("kind", named_cells())
def test_cells_are_named_as_in_the_functions_code(kind):
    function, names, own = named_cells()[kind]
    activations = profile_activations(function, [batch(0)]).activations
    assert sorted({its.place.cell for its in activations if its.kind == "output"}) == sorted([*names, own])


@quick_in_graph_mode
def test_what_is_no_forward_is_refused(mode):
    _, step, forward = made("with_aux")
    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)

    def train_step(x, y):
        x, y = step.begin(x, y)
        (_, loss), grads = value_and_grad(x, y)
        return loss, step.end(grads)

    before = {name: its.asnumpy().copy() for name, its in step.parameters_dict().items()}
    for function in (train_step, mindspore.jit(train_step)):
        for diagnose in (
            lambda its: profile_gradients(its, step.parameters, [inputs(1.0)]),
            lambda its: locate_overflow(its, inputs(1.0), loss_scale=1.0),
        ):
            with pytest.raises(RuntimeError, match=r"must not make a step. Pass the function that is differentiated"):
                diagnose(function)
    for name, its in step.parameters_dict().items():
        np.testing.assert_array_equal(its.asnumpy(), before[name])
    for diagnose in (
        lambda its: profile_gradients(its, None, [inputs(1.0)]),
        lambda its: profile_activations(its, [inputs(1.0)]),
        lambda its: locate_overflow(its, inputs(1.0), loss_scale=1.0),
        lambda its: advise_float32(its, None, [inputs(1.0)]),
    ):
        with pytest.raises(TypeError, match=r"got a 'ManualStep', which does not know it. Pass the function that you"):
            diagnose(step)

    # The step goes on.
    if mode == "pynative":
        assert not bool(train_step(*map(Tensor, inputs(1.0)))[1])


@quick_in_pynative_mode
def test_an_image_before_its_loss_is_refused(mode):
    network, step, forward = made("with_aux")

    def image_first(x, y):
        return network(x), forward(x, y)[1]

    with pytest.raises(RuntimeError, match="network 0 must return its loss first"):
        profile_gradients(image_first, step.parameters, [inputs(1.0)])
    assert step.counters()["applied_steps"] == 0
