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

from ms_lossscale import (
    ScaledTrainOneStepCell,
    advise_float32,
    locate_overflow,
    profile_activations,
    profile_gradients,
)

X = batch()[0]
IN_PYNATIVE_MODE = [
    lambda its, inputs: locate_overflow(its, [inputs], loss_scale=1.0),
    lambda its, inputs: profile_activations(its, [inputs]),
    lambda its, inputs: advise_float32(its, [inputs]),
]


def in_present_mode(network, inputs):
    return profile_gradients(network, [inputs])


class Chain(nn.Cell):
    """A layer of ones, a cell after it, and the mean of what that puts out."""

    def __init__(self, cell):
        super().__init__()
        self.dense = nn.Dense(FEATURES, FEATURES, weight_init="ones", has_bias=False)
        self.cell = cell

    def construct(self, x):
        return self.cell(self.dense(x)).astype(mstype.float32).mean()


def check_gradients(report, network, *inputs):
    """Against what graph mode computes."""
    with in_mode(mindspore.GRAPH_MODE):
        grads = ops.value_and_grad(network, None, ParameterTuple(network.trainable_params()))(*inputs)[1]
    for (name, distribution), grad in zip(report.parameters.items(), grads):
        grad = np.abs(grad.asnumpy())
        extremes = [grad[grad != 0].min(), grad.max()]
        np.testing.assert_allclose([distribution.min, distribution.max], extremes, 1e-5, 0, name)
        assert distribution.zeros == np.sum(grad == 0)


def check_all(network, *inputs):
    """All run, change nothing and count the gradients. Returns the places of the outputs, and of their gradients."""
    with untouched(network):
        assert not locate_overflow(network, [inputs], loss_scale=1.0).found
        report = profile_activations(network, [inputs])
        check_gradients(in_present_mode(network, inputs), network, *inputs)
    return [
        [str(its.place) for its in report.activations if its.kind == kind and ".rnn" not in str(its.place)]
        for kind in ("output", "gradient")
    ]


def located(network, x, loss_scale=1.0):
    trace = locate_overflow(network, [x], loss_scale=loss_scale)
    return trace.cell, trace.direction, trace.kind


class Positions(nn.Cell):
    """What its table puts out needs no gradient: it is a constant or a frozen Parameter."""

    def __init__(self, frozen):
        super().__init__()
        values = Tensor(np.full((8, FEATURES), 300.0, np.float32))
        self.table = nn.ReLU()
        self.values = Parameter(values, name="table", requires_grad=False) if frozen else values

    def construct(self, x):
        return x + self.table(self.values[: x.shape[0]] * 2.0)


class Transformed(nn.Cell):
    """Calls `vmap`, `jacrev` or `jacfwd` of a function with a cell in it."""

    def __init__(self, transform):
        super().__init__()
        self.inner = nn.Dense(FEATURES, 1, weight_init="ones")
        self.transformed = transform(self.function)

    def function(self, x):
        return ops.tanh(self.inner(x * 0.1).sum())

    def construct(self, x):
        return self.transformed(x)


class OutputOnly(nn.Cell):
    """Nothing uses the other outputs."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 2)

    def construct(self, x):
        return self.lstm(x[:, None])[0]


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


OUTER = ["dense", "cell", "Chain"]
# A cell, the places of its outputs besides those of the chain, and what gradients reach.
NETWORKS = {
    "a constant": (lambda: Positions(False), ["cell.table"], []),
    "frozen": (lambda: Positions(True), ["cell.table"], []),
    "outputs that nothing uses": (OutputOnly, ["cell.lstm", "cell.lstm [1]", "cell.lstm [2]"], ["cell.lstm"]),
    "a backward of its own": (Custom, ["cell.inner"], []),
    **{name: (lambda name=name: Transformed(getattr(mindspore, name)), None, None) for name in ("vmap", "jacrev")},
}


@quick_in_pynative_mode
@pytest.mark.parametrize("name", [*list(NETWORKS)[:-1], *slow("jacrev")])
def test_what_is_seen_of(mode, name):
    make, outputs, gradients = NETWORKS[name]
    seen = check_all(Chain(make()), X)
    assert all(set(OUTER) <= set(its) for its in seen)
    if outputs is not None:
        # Once each.
        assert [sorted(its) for its in seen] == [sorted([*OUTER, *more]) for more in (outputs, gradients)]
    assert located(Chain(make()), X * 1e10) == ("dense", "forward", "saturated")


@quick_in_graph_mode
def test_overflows_without_and_with_a_backward_of_ones_own(mode):
    network = Chain(Positions(False).to_float(mstype.float16))
    network.cell.values = (network.cell.values * 200.0).astype(mstype.float16)
    assert located(network, X) == ("cell.table", "forward", "inf")
    assert located(Chain(Custom(2.0**15).to_float(mstype.float16)), X, 2.0**10) == ("cell", "backward", "inf")


class GraphOnly(nn.Cell):
    """Fails unless it is compiled, which does not call it."""

    def __call__(self, *inputs):
        raise TypeError("not written for PyNative mode")

    def construct(self, x):
        return ops.square(x) * 1e4


def test_a_network_that_runs_in_graph_mode_only(mode):
    network, diagnoses = Chain(GraphOnly()), IN_PYNATIVE_MODE
    if mode == "graph":
        with untouched(network):
            check_gradients(in_present_mode(network, X), network, X)
    else:
        diagnoses = [*diagnoses, in_present_mode]
    says = (
        r"not written for PyNative mode\nIt was run in PyNative mode. A network that runs in graph mode only can't be"
    )
    for diagnose in diagnoses:
        with untouched(network), pytest.raises(RuntimeError, match=says):
            diagnose(network, X)


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
    for diagnose in IN_PYNATIVE_MODE[:2]:
        with untouched(network), pytest.raises(RuntimeError, match=r"the network fails on batches\[0\], before"):
            diagnose(network, X)


class OtherInputs(nn.Cell):
    """Takes whatever a network may take besides Tensors."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 1)

    def construct(self, pair, mask, kind, doubles, factor):
        x, y = pair
        x = x if mask is None else x * mask
        loss = ops.square(self.dense(x) - y["target"]).mean() * factor
        return 2 * loss if doubles and kind == "sum" else loss


@pytest.mark.parametrize("diagnose", [*IN_PYNATIVE_MODE, in_present_mode])
def test_inputs_that_are_no_tensors(diagnose):
    x, y = (tensor.asnumpy() for tensor in batch())
    network = OtherInputs()
    with untouched(network):
        diagnose(network, ((x, {"target": y}), None, "sum", True, 0.5))
    report = profile_gradients(network, [((x, {"target": y}), None, "sum", True, 0.5)])
    expected = profile_gradients(nn.WithLossCell(network.dense, nn.MSELoss()), [(x, y)])
    assert report.total.as_dict() == expected.total.as_dict()


def become_view(parameter):
    """The same values, reshaped from another shape, as `parameter.set_data(value.reshape(...))` makes them."""
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
    reports = []
    for network in (with_views, without):
        with untouched(network):
            reports.append(in_present_mode(network, batch()).to_json())
            for diagnose in IN_PYNATIVE_MODE[:2]:
                diagnose(network, batch())
    assert reports[0] == reports[1]


class Penalty(nn.Cell):
    """The square of the slope of a critic, which has second derivatives. PyNative mode loses its gradients."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Dense(FEATURES, 1, weight_init="ones", activation="tanh")
        self.gradient = ops.GradOperation()

    def construct(self, x, y):
        return ops.square(self.gradient(self.critic)(x)).sum() + 0.0 * y.sum()


LOSES = "takes a gradient in its forward, and MindSpore's PyNative mode loses the gradients of that gradient: what fl"


@quick_in_graph_mode
def test_a_gradient_penalty(mode):
    network, inputs, diagnoses = Penalty(), batch(0), IN_PYNATIVE_MODE
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        if mode == "graph":
            check_gradients(in_present_mode(network, inputs), network, *inputs)
        else:
            diagnoses = [*diagnoses, in_present_mode]
        for diagnose in diagnoses:
            with untouched(network), pytest.warns(RuntimeWarning, match=f"'Penalty' {LOSES}"):
                diagnose(network, inputs)
            diagnose(Linear(), inputs)


class HiddenCount(nn.Cell):
    """Counts its calls where MindSpore registers no Parameter."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 1)
        self.calls = [Parameter(Tensor(0.0), name="calls", requires_grad=False)]
        self.one = Tensor(1.0)

    def construct(self, x):
        ops.assign_add(self.calls[0], self.one)
        return self.dense(x).mean()


@quick_in_pynative_mode
def test_what_a_training_cell_was_told_to_restore_stays_as_it_is(mode):
    network = HiddenCount()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    cell = ScaledTrainOneStepCell(network, optimizer, 2.0, forward_state=network.calls).set_train()
    cell(X)
    for diagnose in (*IN_PYNATIVE_MODE, in_present_mode):
        diagnose(cell, [X])
    assert network.calls[0].asnumpy() == 1
