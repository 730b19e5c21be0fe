"""The diagnoses run on what other people's networks do, and never call a failure of their own the network's."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from support.in_mode import in_mode
from support.networks import FEATURES, batch
from support.untouched import untouched

from ms_lossscale import locate_overflow, profile_activations, profile_gradients
from ms_lossscale.diagnosis import cell_watch

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


@pytest.mark.parametrize("frozen", [False, True])
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
    if mode == "pynative":
        for diagnose in (
            lambda: locate_overflow(network, X, loss_scale=1.0),
            lambda: profile_gradients(network, batches=[X]),
        ):
            with (
                untouched(network),
                pytest.raises(RuntimeError, match=r"in PyNative mode, .*: not written for PyNative"),
            ):
                diagnose()
        return
    with untouched(network):
        largest = profile_gradients(network, batches=[X, X]).largest
    np.testing.assert_allclose(largest, np.abs(graph_gradients(network, X)[0]).max(), rtol=1e-5)
    trace = locate_overflow(network, X * 1e-3, loss_scale=1.0)
    assert not trace.found
    assert "runs in graph mode only" in str(trace)
    # The gradients overflow before the loss does.
    for inputs, scale, direction, cell in ((X, 2.0**126, "backward", "dense"), (X * 1e20, 1.0, "forward", "Chain")):
        trace = locate_overflow(network, inputs, loss_scale=scale)
        assert (trace.cell, trace.direction) == (cell, direction)
        assert "runs in graph mode only" in trace.note
    with pytest.raises(RuntimeError, match=r"'profile_activations', .* in PyNative mode, in which the diagnosis runs"):
        profile_activations(network, [X])


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
    with untouched(network), pytest.raises(RuntimeError, match=r"the network fails on batches\[0\] in PyNative mode"):
        profile_activations(network, [X])
    with untouched(network), pytest.raises(RuntimeError, match="the network fails on these inputs in PyNative mode"):
        locate_overflow(network, X, loss_scale=1.0)


def test_what_fails_in_the_diagnosis_is_not_called_the_networks_failure(monkeypatch):
    def fail(_value):
        raise ValueError("on purpose")

    network = Chain(nn.Identity())
    monkeypatch.setattr(cell_watch, "is_float", fail)
    message = "For 'profile_activations', watching the cells failed, .*no fault of the network.*on purpose"
    with untouched(network), pytest.raises(RuntimeError, match=message):
        profile_activations(network, [X])
