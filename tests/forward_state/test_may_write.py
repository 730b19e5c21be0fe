"""What is too large to be copied in case: its source is read, which finds all that may write it, and little else."""

import functools
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from support import forward_writing_networks as networks
from support.forward_writing_networks import RUNNABLE, residual_network, state

from ms_lossscale.forward_state import find
from ms_lossscale.forward_state.find import find_forward_state
from ms_lossscale.forward_state.source import declares_writing


@pytest.fixture(autouse=True)
def _all_is_large(monkeypatch):
    monkeypatch.setattr(find, "_FEW", 0)


def only_written(network):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find_forward_state("cell", (network,))
    assert found.unregistered == []
    buffers = ["buffer " + name.partition(".")[2] for name in found.names[len(found.parameters) :]]
    return sorted([*(parameter.name for parameter in found.parameters), *buffers])


def undecided(network, shown=None):
    """What is found, and the warning of what is not decided."""
    with pytest.warns(RuntimeWarning, match="it can't be told whether the forward writes") as caught:
        found = find_forward_state("cell", (network,))
    return sorted(found.names), str(caught[0].message)


@pytest.mark.parametrize("cls", RUNNABLE, ids=lambda cls: cls.__name__)
def test_of_a_network(cls):
    # Of Parameters by number it is not known which.
    also = ("past.0", "past.2") if cls is networks.Histories else ()
    assert only_written(cls()) == sorted([*cls.writes, *also])


class ReadingByAGradient(nn.Cell):
    """What is changed in place is an input, though the gradient is given a Parameter."""

    def __init__(self):
        super().__init__()
        self.trained = state("trained", trainable=True)

    def loss(self, x):
        x += 1
        return x * self.trained

    def construct(self, x):
        return ops.value_and_grad(self.loss, None, (self.trained,))(x)


class ReadingOnly(nn.Cell):
    """A frozen network of 10 million weights in a user's own cell, through the operators that such cells use."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((3200, 3200), np.float32)), name="weight", requires_grad=False)
        self.bias, self.gamma, self.beta = state("bias", (3200,)), state("gamma"), state("beta")
        self.kernel = state("kernel", (64, 64, 3, 3))
        self.tokens = state("tokens", trainable=True)
        self.matmul, self.conv, self.norm = ops.MatMul(transpose_b=True), ops.Conv2D(64, 3), ops.LayerNorm()

    def construct(self, x):
        return self.products(x) + self.shapes(x) + self.normalised(x) + self.rebound(x) + self.chosen(x)

    def products(self, x):
        y = self.matmul(x, self.weight) + self.bias
        y = ops.dense(y, self.weight, self.bias) + mint.nn.functional.linear(y, self.weight, self.bias)
        y = ops.conv2d(y, self.kernel) + self.conv(y, self.kernel) + mint.nn.functional.conv2d(x, self.kernel)
        y = ops.bmm(y, self.weight) + mint.matmul(y, self.weight) + self.weight.matmul(y) + y.matmul(self.weight)
        y = ops.einsum("ij,jk->ik", y, self.weight) + mint.addmm(self.bias, x, self.weight)
        return ops.prelu(y, self.bias) + ops.bias_add(y, self.bias)

    def shapes(self, x):
        pieces = ops.split(self.weight, 2)
        joined = ops.concat((self.weight, self.weight)) + ops.stack([self.weight]) + pieces[0]
        turned = self.weight.reshape(3, -1).transpose(1, 0) + self.weight.view(-1, 10)
        cast = ops.cast(self.weight, ms.float16) + self.weight.to(ms.float16) + self.weight.astype(ms.float16)
        return joined + turned + cast + ops.stop_gradient(self.weight) * x

    def normalised(self, x):
        x = mint.nn.functional.relu(self.gamma) + mint.nn.functional.dropout(self.gamma)
        y = self.norm(x, self.gamma, self.beta)[0] + ops.layer_norm(x, (3,), self.gamma, self.beta)
        y = y + mint.nn.functional.layer_norm(y, (3,), self.gamma, self.beta)
        return mint.nn.functional.group_norm(y, 2, self.gamma, self.beta)

    def rebound(self, x):
        """What is changed in place here is a new tensor."""
        y = self.weight * 2
        y += x
        outputs = [self.weight]
        outputs += [x]
        tokens = ops.concat((self.tokens, x))
        tokens[0] = x
        return y + tokens + outputs[0]

    def chosen(self, x):
        y = ops.gather(self.weight, x, 0) + mint.nn.functional.embedding(x, self.weight)
        y = y + ops.clip_by_value(self.weight, 0, 1) + ops.where(x > 0, self.weight, self.bias)
        y = y + ops.lerp(self.weight, self.weight, 0.5) + ops.interpolate(x, 2) + ops.relu(x)
        return y + ops.scatter(self.weight, 0, x, x) + ops.tensor_scatter_elements(self.weight, x, x)


def test_reading_is_no_writing():
    network = ReadingOnly()
    assert sum(parameter.size for parameter in network.get_parameters()) > 10_000_000
    assert only_written(nn.SequentialCell(network, ReadingByAGradient())) == []


STATISTICS = ["0.1.moving_mean", "0.1.moving_variance", "2.moving_mean", "2.moving_variance"]


def test_frozen_network_of_mindspore():
    assert only_written(residual_network()) == STATISTICS


def test_mixed_precision_and_loss_cell():
    network = nn.WithLossCell(amp.auto_mixed_precision(nn.SequentialCell(networks.Queue()), "O2"), nn.MSELoss())
    assert only_written(network) == ["0.next", "0.queue"]


def test_normalisation_of_mint():
    assert only_written(mint.nn.BatchNorm1d(3)) == ["num_batches_tracked", "running_mean", "running_var"]


def test_thor_layer():
    assert {"matrix_a", "matrix_g"} <= set(only_written(nn.DenseThor(3, 3)))


class NamedAlike(nn.Cell):
    """A user's own normalisation, whose statistics are written by means that are not followed."""

    def __init__(self):
        super().__init__()
        self.moving_mean = state("moving_mean")
        self.moving_variance = state("moving_variance", trainable=True)

    def construct(self, x):
        return x


def test_statistics_are_known_by_name_in_users_cells_too():
    assert only_written(NamedAlike()) == ["moving_mean"]


class Undecided(nn.Cell):
    def __init__(self, function=None):
        super().__init__()
        self.u = state("u")
        self.frozen = state("frozen")
        self.trained = state("trained", trainable=True)
        self.register_buffer("seen", Tensor(np.zeros(3, np.float32)))
        self.register_buffer("mask", Tensor(np.ones(3, np.float32)))
        self.function = function


def unreadable(name, text):
    """What is made of source that stands in no file."""
    namespace = {"nn": nn, "ops": ops, "Undecided": Undecided}
    exec(text, namespace)
    return namespace[name]


class PassedToTheUnreadable(Undecided):
    def construct(self, x):
        return self.function(self.u, self.seen, self.trained) + self.frozen * self.mask


class PassedToNothingKnown(Undecided):
    def construct(self, x):
        return eval("lambda *all: all")(self.u, self.seen) + self.frozen * self.mask


class PassedToWhatIsAttachedLater(Undecided):
    def construct(self, x):
        return self.attached_later(self.u, self.seen) + self.frozen * self.mask


class PassedToCustomOperator(Undecided):
    def __init__(self):
        super().__init__(ops.Custom(lambda *all: all[0], lambda *all: all[0], lambda *all: all[0], func_type="pyfunc"))

    def construct(self, x):
        return self.function(self.u, self.seen) + self.frozen * self.mask


@pytest.mark.parametrize(
    "network",
    [
        PassedToTheUnreadable(unreadable("f", "def f(*all):\n    return all[0]")),
        PassedToNothingKnown(),
        PassedToWhatIsAttachedLater(),
        PassedToCustomOperator(),
    ],
    ids=["a function without source", "nothing known", "a method attached later", "a custom operator"],
)
def test_what_is_passed_on_is_undecided(network):
    found, message = undecided(network)
    assert found == []
    assert "writes u, buffer" in message or "writes u, seen" in message
    assert "passed to" in message


NO_SOURCE = "class NoSource(Undecided):\n    def construct(self, x):\n        return self.u"


class Endless(Undecided):
    """Each look at an attribute makes a new object."""

    def __init__(self):
        super().__init__(np.zeros(3))

    def construct(self, x):
        link = self.function
        while x.sum() > 0:
            link = link.T
        return x * self.u


class Executed(Exception):
    pass


class RaisingDescriptor:
    def __get__(self, owner, cls):
        ops.assign(owner.of_descriptor, owner.of_descriptor * 2)
        raise Executed

    def __set__(self, owner, value):
        raise Executed


class Raising:
    """All that Python would run of it to look an attribute up writes something, and raises."""

    descriptor = RaisingDescriptor()

    def __init__(self, states):
        vars(self).update(states)

    def __getattr__(self, name):
        ops.assign(self.of_getattr, self.of_getattr * 2)
        raise Executed

    @property
    def computed(self):
        ops.assign(self.of_property, self.of_property * 2)
        raise Executed

    @functools.cached_property
    def cached(self):
        ops.assign(self.of_cached, self.of_cached * 2)
        raise Executed

    @property
    def inherited(self):
        ops.assign(self.of_super, self.of_super * 2)
        raise Executed


class RaisingMore(Raising):
    @property
    def inherited(self):
        return super().inherited


class HoldsWhatRaises(nn.Cell):
    written = ("of_cached", "of_descriptor", "of_getattr", "of_property", "of_super")

    def __init__(self):
        super().__init__()
        states = {name: state(name) for name in (*self.written, "frozen")}
        for name, its in states.items():
            setattr(self, name, its)
        self.held = RaisingMore(states)

    def construct(self, x):
        held = self.held
        return x * held.anything * held.descriptor * held.computed * held.cached * held.inherited * held.frozen


def test_nothing_of_the_users_is_executed():
    assert only_written(HoldsWhatRaises()) == list(HoldsWhatRaises.written)


class Listening(networks.StepCounter):
    """A cell that is told of each attribute that it does not have, as some models are that warn of it."""

    def __getattr__(self, name):
        ASKED_FOR.append(name)
        return super().__getattr__(name)


ASKED_FOR = []


def test_a_cell_is_asked_for_no_attribute_that_it_does_not_have():
    network = nn.SequentialCell(Listening())
    ASKED_FOR.clear()
    assert only_written(network) == ["0.count"]
    assert set(ASKED_FOR) <= {"count"}


@pytest.mark.parametrize(
    "network, why",
    [
        (unreadable("NoSource", NO_SOURCE)(), "'NoSource.construct', whose source can't be read"),
        (Endless(), "can't be followed: it has no end"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Cell) else "",
)
def test_strange_code_is_undecided_and_spares_the_cells_around_it(network, why):
    found, message = undecided(nn.SequentialCell(networks.StepCounter(), network))
    assert found == ["0.count"]
    assert "1.u" in message
    assert why in message


def test_what_primitives_declare():
    assert all(map(declares_writing, (ops.Assign, ops.ScatterNdUpdate, ops.BatchNorm, ops.Adam)))
    assert not any(map(declares_writing, (ops.MatMul, ops.Add, ops.TensorScatterUpdate)))
