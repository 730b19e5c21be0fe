"""The diagnoses of functions, such as those that are differentiated around a ManualStep."""

import itertools
import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import Linear, batch
from support.python_process import is_older_mindspore

import ms_lossscale as ls


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


def is_lost(diagnosed):
    """Whether a value is, that float32 does not hold."""
    trace = ls.locate_overflow(diagnosed, [inputs(4e4)], loss_scale=1.0)
    return trace.found and trace.tensor.non_finite > 0


class Loss(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return ops.square(self.network(x).astype(mstype.float32) - y).mean()


def made(kind="with_aux"):
    """A float16 network, a ManualStep, a function of this kind, and a Cell that computes the same."""
    network = Block().to_float(mstype.float16)
    loss = Loss(network)
    step = ls.ManualStep(network, nn.SGD(network.trainable_params(), 0.1), ls.DynamicLossScale(2.0**10))

    def plain(x, y):
        return ops.square(network(x).astype(mstype.float32) - y).mean()

    def with_aux(x, y):
        loss = plain(x, y)
        return loss, loss

    return network, step, {"with_aux": with_aux, "plain": plain, "jit": mindspore.jit(plain)}[kind], loss


@quick_in_graph_mode
@pytest.mark.parametrize("kind", ["with_aux", *slow("plain", "jit")])
def test_a_function_is_diagnosed_as_a_cell_that_computes_the_same(mode, kind):
    network, step, function, cell = made(kind)
    ordinary = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32), np.ones((4, 2), np.float32)
    report = ls.profile_gradients(function, [ordinary])
    expected = ls.profile_gradients(cell, [ordinary], parameters=network.trainable_params())
    assert list(report.parameters) == ["dense.weight", "norm.gamma", "norm.beta"]
    assert report.recommended_loss_scale == expected.recommended_loss_scale
    assert [its.as_dict() for its in report.parameters.values()] == [
        its.as_dict() for its in expected.parameters.values()
    ]
    places = [
        str(its.place) for its in ls.profile_activations(function, [ordinary]).activations if its.kind == "output"
    ]
    assert places[:3] == ["network.dense", "network.norm", "network"]
    trace = ls.locate_overflow(function, [inputs(4e4)], loss_scale=2.0)
    assert (trace.cell, trace.direction, trace.kind, trace.loss_scale) == ("network.dense", "forward", "inf", 2.0)
    assert not ls.locate_overflow(function, [inputs(1.0)], loss_scale=2.0).found
    assert (step.get_loss_scale(), step.counters()["applied_steps"]) == (2.0**10, 0)


@quick_in_pynative_mode
def test_looking_in_between_begin_and_end_changes_nothing_and_the_weights_of_several_optimizers(mode):
    networks = [Linear(), Linear(seed=1)]
    networks[1].weight.name = "second.weight"
    step = ls.ManualStep(networks, [nn.SGD([its.weight], 0.1) for its in networks], ls.DynamicLossScale(2.0**10))

    def forward(x, y):
        return networks[0](x, y) + networks[1](x, y)

    weight = networks[0].weight.asnumpy().copy()
    x, y = step.begin(*batch(0))
    assert not ls.locate_overflow(forward, [(x, y)], loss_scale=2.0**10).found
    assert list(ls.profile_gradients(forward, [(x, y)], parameters=step.parameters).parameters) == [
        "weight",
        "second.weight",
    ]
    step.end(*(step.value_and_grad(forward, i)(x, y)[1] for i in range(2)))
    x, y = (each.asnumpy() for each in batch(0))
    # float32 rounds by 2**-24 a few times; another scale is off by factors.
    expected = weight - 0.1 * 2 / len(x) * x.T @ (x @ weight - y)
    np.testing.assert_allclose(networks[0].weight.asnumpy(), expected, rtol=1e-6)


@quick_in_graph_mode
def test_which_cells_need_float32(mode):
    network, step, function, cell = made()
    advice = ls.advise_float32(function, [inputs(4e4)], parameters=step.parameters)
    assert (advice.cells, advice.holds) == (["network.dense", "network.norm"], True)
    assert "network.dense      Dense  forward: its output is inf" in str(advice)
    assert advice.loss_scale == ls.advise_float32(cell, [inputs(4e4)]).loss_scale
    # What it says to do works, and so does `apply`.
    exec(advice.lines(), {"network": network})
    assert not is_lost(function)
    network, step, function, _ = made()
    ls.advise_float32(function, [inputs(4e4)], parameters=step.parameters).apply()
    assert not is_lost(function)


def test_advice_that_comes_after_the_step_was_compiled_says_so(mode):
    _, step, forward, _ = made("plain")
    _, other_step, other_forward, _ = made("plain")
    value_and_grad = step.value_and_grad(forward)

    @mindspore.jit
    def train_step(x, y):
        x, y = step.begin(x, y)
        loss, grads = value_and_grad(x, y)
        return loss, step.end(grads)

    advice = ls.advise_float32(forward, [inputs(4e4)], parameters=step.parameters)
    assert advice.holds
    train_step(*map(Tensor, inputs(1.0)))
    with pytest.warns(RuntimeWarning, match=r"a ManualStep that trains these cells was compiled by mindspore\.jit"):
        advice.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ls.advise_float32(other_forward, [inputs(4e4)], parameters=other_step.parameters).apply()


def test_advice_reaches_a_step_that_python_made(mode):
    """In graph mode, too, which has compiled the gradients, unless by somebody else's function: that is told."""
    _, step, forward, _ = made("plain")
    value_and_grad = step.value_and_grad(forward)

    def overflows(size):
        _, grads = value_and_grad(*step.begin(*map(Tensor, inputs(size))))
        return bool(step.end(grads))

    assert (overflows(1.0), overflows(4e4)) == (False, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ls.advise_float32(forward, [inputs(4e4)], parameters=step.parameters).apply()
    assert not overflows(4e4)

    _, step, forward, _ = made("plain")

    def scaled(x, y):
        return step.scale(forward(x, y))

    value_and_grad = mindspore.value_and_grad(scaled, None, step.parameters)
    assert not overflows(1.0)
    advice = ls.advise_float32(forward, [inputs(4e4)], parameters=step.parameters)
    if mode == "graph":
        with pytest.warns(RuntimeWarning, match=r"or by graph mode in a mindspore\.value_and_grad, and the compiled"):
            advice.apply()
    else:
        advice.apply()
    if mode == "pynative" or not is_older_mindspore():  # MindSpore 2.7 compiles again.
        assert overflows(4e4) == (mode == "graph")


def test_what_a_function_computes_itself():
    network = nn.Dense(2, 2, weight_init="ones", has_bias=False).to_float(mstype.float16)

    def forward(x):
        hidden = network(x)
        return (hidden * hidden).astype(mstype.float32).mean()

    advice = ls.advise_float32(forward, [np.full((4, 2), 1e3, np.float32)], parameters=network.trainable_params())
    # The function casts nothing, so that float32 in the cell suffices.
    assert (advice.cells, advice.holds) == (["network"], True)

    def forward_of_float16(x):
        return network(x * 1e4).astype(mstype.float32).mean()

    advice = ls.advise_float32(
        forward_of_float16, [np.full((4, 2), 1e3, np.float16)], parameters=network.trainable_params()
    )
    assert (advice.cells, advice.holds) == ([""], True)
    assert "# in forward_of_float16, for what it computes itself" in str(advice)
    with pytest.raises(RuntimeError, match=r"'apply\(\)' can't change the code of the function 'forward_of_float16'"):
        advice.apply()


def test_a_function_in_a_training_cell():
    network, _, forward, _ = made("plain")
    cell = ls.ScaledTrainOneStepCell(forward, nn.SGD(network.trainable_params(), 0.1), ls.DynamicLossScale())
    advice = ls.advise_float32(cell, [inputs(4e4)])
    assert advice.cells == ["network.dense", "network.norm"]
    exec(advice.lines(), {"cell": cell})
    assert not is_lost(cell)


class Trainer:
    def __init__(self):
        self.networks, self.parts = [Linear(), Linear()], {"last": Linear()}
        for i, network in enumerate((*self.networks, self.parts["last"])):
            network.weight.name = str(i)

    def forward(self, x, y):
        return self.networks[0](x, y) + self.networks[1](x, y) + self.parts["last"](x, y)


def named_cells():
    """From a kind to a function, the names of the cells that it uses, and its own."""
    closure, other = Linear(), Linear()
    other.weight.name = "other"

    def of_closure(x, y):
        return closure(x, y)

    def of_default(x, y, network=other):
        return of_closure(x, y) + network(x, y)

    return {
        "functions": (of_default, ["closure", "network", "of_default"]),
        "method": (Trainer().forward, ["forward", "self.networks.0", "self.networks.1", "self.parts.last"]),
    }


@quick_in_pynative_mode
def test_lines_reach_cells_in_lists_and_dicts(mode):
    blocks, by_name = [Block()], {"last one": Block()}
    for block in (blocks[0], by_name["last one"]):
        block.to_float(mstype.float16)

    def forward_of_list(x, y):
        return ops.square(blocks[0](x) - y).mean().astype(mstype.float32)

    def forward_of_dict(x, y):
        return ops.square(by_name["last one"](x) - y).mean().astype(mstype.float32)

    for forward, name in ((forward_of_list, "blocks.0"), (forward_of_dict, "by_name.last one")):
        advice = ls.advise_float32(forward, [inputs(4e4)])
        assert advice.cells == [f"{name}.dense", f"{name}.norm"]
        exec(advice.lines(), {"blocks": blocks, "by_name": by_name})
        assert not is_lost(forward)


@quick_in_pynative_mode
def test_of_a_network_in_training_its_cells_keep_their_modes(mode):
    """As in the step that a function is differentiated for, which skips nothing here."""
    network = nn.SequentialCell(nn.BatchNorm1d(2), nn.Dense(2, 1))

    def forward(x):
        return network(x).mean()

    one_sample = [np.ones((1, 2), np.float32)]
    assert ls.locate_overflow(forward, one_sample).found
    network.set_train()
    network[0].set_train(False)
    assert not ls.locate_overflow(forward, one_sample).found


@pytest.mark.parametrize("kind", named_cells())
def test_cells_are_named_as_in_the_functions_code(kind):
    function, names = named_cells()[kind]
    activations = ls.profile_activations(function, [batch(0)]).activations
    assert sorted({its.place.cell for its in activations if its.kind == "output"}) == names


@quick_in_graph_mode
def test_what_is_no_forward_is_refused(mode):
    network, step, forward, _ = made()
    value_and_grad = step.value_and_grad(forward, has_aux=True)

    def train_step(x, y):
        x, y = step.begin(x, y)
        (_, loss), grads = value_and_grad(x, y)
        return loss, step.end(grads)

    def image_first(x, y):
        return network(x), forward(x, y)[1]

    with pytest.raises(RuntimeError, match="network 0 must return its loss first"):
        ls.profile_gradients(image_first, [inputs(1.0)], parameters=step.parameters)
    diagnoses = [
        lambda its: ls.profile_gradients(its, [inputs(1.0)], parameters=None if its is step else step.parameters),
        lambda its: ls.locate_overflow(its, [inputs(1.0)], loss_scale=1.0),
        lambda its: ls.profile_activations(its, [inputs(1.0)]),
        lambda its: ls.advise_float32(its, [inputs(1.0)]),
    ]
    before = {name: its.asnumpy().copy() for name, its in step.parameters_dict().items()}
    for diagnose, wrong in itertools.product(diagnoses, (train_step, mindspore.jit(train_step), step)):
        with pytest.raises(TypeError, match=r"got a 'ManualStep', or a function that uses one. Pass a function that"):
            diagnose(wrong)
    for name, its in step.parameters_dict().items():
        np.testing.assert_array_equal(its.asnumpy(), before[name])
    # The step goes on.
    if mode == "pynative":
        assert not bool(train_step(*map(Tensor, inputs(1.0)))[1])
