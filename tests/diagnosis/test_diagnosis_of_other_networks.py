"""The diagnoses run on what other people's networks do."""

import contextlib
import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from support.in_mode import in_mode
from support.networks import FEATURES, Linear, batch, weight
from support.untouched import untouched

from ms_lossscale import advise_float32, locate_overflow, profile_activations, profile_gradients

X = batch()[0]
SCALE = 2.0**10
WAYS = ("rev", "fwd")


class Chain(nn.Cell):
    """A layer of ones, a cell after it, and the mean of what that puts out."""

    def __init__(self, cell):
        super().__init__()
        self.dense = nn.Dense(FEATURES, FEATURES, weight_init="ones", has_bias=False)
        self.cell = cell

    def construct(self, x):
        return self.cell(self.dense(x)).astype(mstype.float32).mean()


def graph_gradients(network, *inputs):
    """The oracle: what graph mode computes."""
    with in_mode(mindspore.GRAPH_MODE):
        weights = ParameterTuple(network.trainable_params())
        return [grad.asnumpy() for grad in ops.value_and_grad(network, None, weights)(*inputs)[1]]


def check_all(network, *inputs):
    """All three run, change nothing and count graph mode's gradients. Returns the report of the activations."""
    with untouched(network):
        assert not locate_overflow(network, inputs, loss_scale=1.0).found
        activations = profile_activations(network, [inputs])
        gradients = profile_gradients(network, batches=[inputs])
    for (name, distribution), grad in zip(gradients.parameters.items(), graph_gradients(network, *inputs)):
        extremes = np.abs(grad[grad != 0])
        np.testing.assert_allclose(
            [distribution.min, distribution.max], [extremes.min(), extremes.max()], 1e-5, 0, name
        )
        assert distribution.zeros == np.sum(grad == 0)
    return activations


def places(report, kind="output"):
    return [str(each.place) for each in report.activations if each.kind == kind]


class Table(nn.Cell):
    """What it puts out needs no gradient: a position table, of a constant or of a frozen Parameter."""

    def __init__(self, frozen):
        super().__init__()
        values = Tensor(np.full((8, FEATURES), 300.0, np.float32))
        self.table = Parameter(values, name="table", requires_grad=False) if frozen else values

    def construct(self, x):
        return self.table[: x.shape[0]] * 2.0


class Positions(nn.Cell):
    def __init__(self, frozen):
        super().__init__()
        self.table = Table(frozen)

    def construct(self, x):
        return x + self.table(x)


@pytest.mark.parametrize("frozen", [False, *slow(True)])
@quick_in_graph_mode
def test_a_cell_whose_output_needs_no_gradient(mode, frozen):
    network = Chain(Positions(frozen))
    report = check_all(network, X)
    assert places(report) == ["dense", "cell.table", "cell", "Chain"]
    assert places(report, "gradient") == ["Chain", "cell", "dense"]
    network.cell.to_float(mstype.float16).table.table.set_dtype(mstype.float16)
    network.cell.table.table *= 200.0
    trace = locate_overflow(network, X, loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.kind) == ("cell.table", "forward", "inf")


class Transformed(nn.Cell):
    """Calls `vmap`, `jacrev` or `jacfwd` of a function with a cell in it."""

    def __init__(self, transform):
        super().__init__()
        self.inner = nn.Dense(FEATURES, 1, weight_init="ones")
        self.transformed = getattr(mindspore, transform)(self.function)

    def function(self, x):
        return ops.tanh(self.inner(x * 0.1).sum())

    def construct(self, x):
        return self.transformed(x)


@quick_in_pynative_mode
@pytest.mark.parametrize("transform", ["vmap", *(pytest.param(f"jac{way}", marks=pytest.mark.slow) for way in WAYS)])
def test_a_network_that_transforms_functions(mode, transform):
    network = Chain(Transformed(transform))
    report = check_all(network, X)
    assert {"dense", "cell", "Chain"} <= set(places(report))
    assert {"dense", "cell", "Chain"} <= set(places(report, "gradient"))
    trace = locate_overflow(network, X * 1e10, loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.kind) == ("dense", "forward", "saturated")


@quick_in_pynative_mode
def test_outputs_that_nothing_uses(mode):
    class OutputOnly(nn.Cell):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(FEATURES, 2)

        def construct(self, x):
            return self.lstm(x[:, None])[0]

    report = check_all(Chain(OutputOnly()), X)
    assert {"cell.lstm", "cell.lstm [1]", "cell.lstm [2]"} <= set(places(report))
    assert sorted(places(report, "gradient")) == ["Chain", "cell", "cell.lstm", "cell.lstm.rnn", "dense"]


class Custom(nn.Cell):
    """A cell with a backward of its own, and a cell inside, which that does not look at."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.inner = nn.Tanh()
        self.factor = factor

    def construct(self, x):
        return x + 0.0 * self.inner(x)

    def bprop(self, _x, _out, dout):
        return (dout * self.factor,)


@quick_in_pynative_mode
def test_a_cell_with_a_backward_of_its_own(mode):
    report = check_all(Chain(Custom()), X)
    assert places(report) == ["dense", "cell.inner", "cell", "Chain"]
    assert places(report, "gradient") == ["Chain", "cell", "dense"]
    network = Chain(Custom(factor=2.0**15).to_float(mstype.float16))
    trace = locate_overflow(network, X, loss_scale=SCALE)
    assert (trace.cell, trace.direction, trace.what, trace.kind) == ("cell", "backward", "gradient", "inf")
    trace = locate_overflow(network, X * 1e5, loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.kind) == ("dense", "forward", "saturated")


class GraphOnly(nn.Cell):
    """Fails unless it is compiled, which does not call it."""

    def __call__(self, *inputs):
        raise TypeError("not written for PyNative mode")

    def construct(self, x):
        return ops.square(x) * 1e4


def test_a_network_that_runs_in_graph_mode_only(mode):
    network = Chain(GraphOnly())
    says = (
        r"not written for PyNative mode\nIt was run in PyNative mode. A network that runs in graph mode only can't be"
    )
    diagnoses = [
        lambda: locate_overflow(network, X, loss_scale=1.0),
        lambda: profile_activations(network, [X]),
        lambda: advise_float32(network, None, [X]),
    ]
    if mode == "graph":
        with untouched(network):
            largest = profile_gradients(network, batches=[X, X]).largest
        np.testing.assert_allclose(largest, np.abs(graph_gradients(network, X)[0]).max(), rtol=1e-5)
    else:
        diagnoses.append(lambda: profile_gradients(network, batches=[X]))
    for diagnose in diagnoses:
        with untouched(network), pytest.raises(RuntimeError, match=says):
            diagnose()


@quick_in_pynative_mode
def test_numbers_in_a_batch(mode):
    class Divided(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(FEATURES, 1, weight_init="ones")

        def construct(self, x, number, factor, negative):
            loss = ops.square(self.dense(x) * factor).sum() / number
            return -loss if negative else loss

    check_all(Divided(), X, 4, 0.5, True)


class TwoDtypes(nn.Cell):
    """MindSpore waits for what fails in it where the next cell's output is looked at."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ReLU()
        self.w = Parameter(Tensor(np.ones((FEATURES, 1), np.float32)))

    def construct(self, x):
        return self.inner(ops.matmul(x, self.w.astype(mstype.float16))).astype(mstype.float32).mean()


def test_an_operator_that_fails_is_the_networks_failure():
    network = TwoDtypes()
    with untouched(network), pytest.raises(RuntimeError, match=r"the network fails on batches\[0\], before"):
        profile_activations(network, [X])
    with untouched(network), pytest.raises(RuntimeError, match="the network fails on these inputs, before"):
        locate_overflow(network, X, loss_scale=1.0)


# Parameters that are views, as `parameter.set_data(value.reshape(...))` makes them.


def become_view(parameter):
    """The same values, reshaped from another shape."""
    parameter.set_data(Tensor(parameter.asnumpy().reshape(-1, 1)).reshape(parameter.shape))


class WithViews(nn.Cell):
    """Its weight, and BatchNorm's scale, are views."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.weight = weight(FEATURES, 1, name="weight")
        become_view(self.weight)
        become_view(self.norm.gamma)

    def construct(self, x, y):
        return ops.square(ops.matmul(self.norm(x), self.weight) - y).mean()


def test_mindspore_does_not_assign_to_a_view_in_pynative_mode():
    with in_mode(mindspore.PYNATIVE_MODE):
        parameter = Parameter(Tensor(np.zeros((2, 3), np.float32)), name="view")
        become_view(parameter)
        # MindSpore 2.10 refuses, 2.7 writes to a copy.
        with contextlib.suppress(RuntimeError):
            ops.assign(parameter, Tensor(np.ones((2, 3), np.float32)))
    # If this fails, MindSpore has mended it, and the way around it can go.
    assert not parameter.asnumpy().any()


@quick_in_graph_mode
def test_parameters_that_are_views(mode):
    with_views, without = WithViews(), WithViews()
    for parameter in (without.weight, without.norm.gamma):
        parameter.set_data(Tensor(parameter.asnumpy()))
    batches = [batch(seed) for seed in range(2)]
    reports = []
    for network in (with_views, without):
        with untouched(network):
            reports.append(profile_gradients(network, batches=batches).to_json())
            profile_activations(network, batches)
            locate_overflow(network, batches[0], loss_scale=1.0)
    assert reports[0] == reports[1]


# Networks that take a gradient in their forward: PyNative mode loses its gradients, and the diagnoses say so.


class Penalty(nn.Cell):
    """The square of the slope of a critic, which has second derivatives."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Dense(FEATURES, 1, weight_init="ones", activation="tanh")
        self.gradient = ops.GradOperation()

    def construct(self, x, y):
        return ops.square(self.gradient(self.critic)(x)).sum() + 0.0 * y.sum()


LOSES = "takes a gradient in its forward, and MindSpore's PyNative mode loses the gradients of that gradient: what fl"


@quick_in_graph_mode
def test_a_gradient_penalty(mode):
    network, inputs = Penalty(), batch(0)
    diagnoses = [
        lambda its: profile_activations(its, [inputs]),
        lambda its: locate_overflow(its, inputs, loss_scale=1.0),
        lambda its: advise_float32(its, None, [inputs]),
    ]
    if mode == "graph":
        with untouched(network), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            report = profile_gradients(network, batches=[inputs])
        for distribution, grad in zip(report.parameters.values(), graph_gradients(network, *inputs)):
            np.testing.assert_allclose(distribution.max, np.abs(grad).max(), rtol=1e-5)
    else:
        diagnoses.append(lambda its: profile_gradients(its, None, [inputs]))
    for diagnose in diagnoses:
        with untouched(network), pytest.warns(RuntimeWarning, match=f"'Penalty' {LOSES}"):
            diagnose(network)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            diagnose(Linear())
