"""What a forward writes is found by reading its source: all of it, and little else."""

import importlib
import warnings

import numpy as np
import pytest
from mindspore import Tensor, amp, mint, nn, ops
from support import forward_writing_networks as networks
from support.forward_writing_networks import RUNNABLE, names_of_all, residual_network, state
from support.ways_of_writing import WAYS, ReadingByAGradient, ReadingByItsParent, ReadingOnly

from ms_lossscale.forward_writes import find_forward_writes, mindspore_internals


def names(parameters):
    return sorted(parameter.name for parameter in parameters)


def only_written(network):
    writes = find_forward_writes((network,))
    assert writes.undecided == []
    return names_of_all(network, writes)


@pytest.mark.parametrize("cls", RUNNABLE, ids=lambda cls: cls.__name__)
def test_of_a_network(cls):
    assert only_written(cls()) == sorted(cls.writes)


@pytest.mark.parametrize("cls", WAYS, ids=lambda cls: cls.__name__)
def test_way_of_writing(cls):
    assert only_written(cls()) == sorted(["u", *getattr(cls, "also_written", ())])


def test_reading_is_no_writing():
    network = ReadingOnly()
    assert sum(parameter.size for parameter in network.get_parameters()) > 10_000_000
    assert only_written(network) == []


@pytest.mark.parametrize("cls", [ReadingByItsParent, ReadingByAGradient])
def test_passing_a_parameter_on_is_no_writing(cls):
    assert only_written(cls()) == []


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


def test_several_networks_that_share_a_cell():
    counter, codebook = networks.StepCounter(), networks.Codebook()
    both = (nn.SequentialCell(counter, codebook), nn.SequentialCell(codebook))
    writes = find_forward_writes(both)
    order = [id(parameter) for parameter in both[0].get_parameters()]
    assert len(writes.written) == 4
    assert [id(p) for p in writes.written] == [i for i in order if i in {id(p) for p in writes.written}]


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
        PassedToTheUnreadable(np.add),
        PassedToNothingKnown(),
        PassedToWhatIsAttachedLater(),
        PassedToCustomOperator(),
    ],
    ids=[
        "a function without source",
        "a function of C",
        "nothing known",
        "a method attached later",
        "a custom operator",
    ],
)
def test_what_is_passed_on_is_undecided(network):
    writes = find_forward_writes((network,))
    assert writes.written == []
    assert names(parameter for parameter, _ in writes.undecided) == ["u"]
    assert "passed to" in writes.undecided[0][1] or "source of 'f' can't be read" in writes.undecided[0][1]
    assert [id(buffer) for buffer in writes.buffers] == [id(network.seen)]


NO_SOURCE = "class NoSource(Undecided):\n    def construct(self, x):\n        return self.u"


class Endless(Undecided):
    def endless(self, values):
        return self.endless([*values, (values, self.u)])

    def construct(self, x):
        return self.endless([self.frozen])


class Multiplying(Undecided):
    def construct(self, x):
        def a():
            return self.u * x

        def b():
            return [a(), a(), a(), a(), a(), a(), a(), a()]

        def c():
            return [b(), b(), b(), b(), b(), b(), b(), b()]

        def d():
            return [c(), c(), c(), c(), c(), c(), c(), c()]

        def e():
            return [d(), d(), d(), d(), d(), d(), d(), d()]

        return [e(), e(), e(), e(), e(), e(), e(), e()]


class FailingProperty(Undecided):
    class Broken:
        def __getattr__(self, name):
            raise ValueError("not now")

    def construct(self, x):
        return self.function.broken(x)


class ClassWithin(Undecided):
    def construct(self, x):
        class Helper:
            pass

        return Helper()


@pytest.mark.parametrize(
    "network, why",
    [
        (unreadable("NoSource", NO_SOURCE)(), "the source of 'NoSource.construct' can't be read"),
        (Endless(), "its calls are nested too deep"),
        (Multiplying(), "it calls too many functions"),
        (FailingProperty(FailingProperty.Broken()), "'FailingProperty.construct' can't be followed: not now"),
        (ClassWithin(), "'class Helper:' is not a statement that is followed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Cell) else "",
)
def test_strange_code_is_undecided_and_spares_the_cells_around_it(network, why):
    counter = networks.StepCounter()
    writes = find_forward_writes((nn.SequentialCell(counter, network),))
    assert names(writes.written) == ["0.count"]
    assert names(parameter for parameter, _ in writes.undecided) == ["1.frozen", "1.u"]
    assert all(why in reason for _, reason in writes.undecided)
    assert len(writes.buffers) == 2


def with_a_class_within(memory):
    class Helper:
        pass

    return Helper(), memory


class UsingWhatIsShared(nn.Cell):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.own = state("own")

    def construct(self, x):
        return with_a_class_within(self.shared)


def test_what_broke_off_in_one_cell_breaks_off_in_the_next():
    shared = state("shared")
    writes = find_forward_writes((UsingWhatIsShared(shared), UsingWhatIsShared(shared)))
    assert names(parameter for parameter, _ in writes.undecided) == ["own", "own", "shared"]


class Wrapping(networks.StepCounter):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def construct(self, x):
        self.count += 1
        return self.inner(x)


def test_cells_within_cells():
    network = nn.ReLU()
    for _ in range(150):
        network = Wrapping(network)
    assert len(only_written(network)) == 150


LITERAL_THAT_PYTHON_WARNS_OF = r"""
from support.ways_of_writing import Writing

class Warned(Writing):
    def construct(self, x):
        "\d"
        return self.u.copy_(x)
"""


def test_literals_that_python_warns_of(tmp_path, monkeypatch):
    (tmp_path / "literals.py").write_text(LITERAL_THAT_PYTHON_WARNS_OF)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = importlib.import_module("literals").Warned()
        warnings.simplefilter("error")
        assert only_written(network) == ["u"]


def test_what_mindspore_keeps_in_private_attributes():
    network = networks.Buffered()
    network.parameter = state("name in a checkpoint")
    network.layer = nn.Dense(3, 3)
    assert set(mindspore_internals.attributes_of(network)) == {"seen", "mask", "parameter", "layer"}
    assert len(mindspore_internals.frozen_state_of(network)) == 3
    assert mindspore_internals.is_buffer(network.seen)
    assert not mindspore_internals.is_buffer(Tensor(1.0))

    def hook(*_):
        return None

    network.register_forward_pre_hook(hook)
    network.register_forward_hook(hook)
    assert mindspore_internals.forward_hooks_of(network) == [hook, hook]


def test_what_mindspore_keeps_of_maps_and_operators():
    graph = ops.MultitypeFuncGraph("graph")
    registered = graph.register("Tensor")(lambda x: x)
    assert mindspore_internals.mapped_function(ops.HyperMap(graph)) is graph
    assert mindspore_internals.mapped_function(ops.Map()) is None
    assert len(mindspore_internals.registered_functions(graph)) == 1
    assert callable(registered)
    assert mindspore_internals.inputs_of_primitive(ops.Assign)[0] == ("variable", True)
    assert ("updates", False) in mindspore_internals.inputs_of_primitive(ops.ScatterNdUpdate)
