"""A step that overflows restores whatever the forward writes, which is found without being told."""

import copy
import types

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, load_param_into_net, nn, ops
from support.networks import FEATURES, batch, batch_for
from support.training import bookkeeping, changed, state
from support.ways_to_reach import Holder

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell


def buffers_of(network):
    return {name: buffer.asnumpy().copy() for name, buffer in network.named_buffers()}


class SpectralNorm(nn.Cell):
    """A linear layer divided by its largest singular value, which a power iteration follows."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.weight = Parameter(Tensor(rng.normal(size=(FEATURES, 1)).astype(np.float32)), name="weight")
        self.u = Parameter(Tensor(np.ones(FEATURES, np.float32)), name="u", requires_grad=False)
        self.frozen = Parameter(Tensor(np.ones(FEATURES, np.float32)), name="frozen", requires_grad=False)

    def follow(self, x):
        ops.assign(self.u, self.u * 0.5 + ops.ReduceMean()(x, 0))

    def construct(self, x, y):
        self.follow(x)
        return ops.square(ops.matmul(x * self.frozen, self.weight) - y).mean()


def of_one(network, **keywords):
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()


def of_each(network, **keywords):
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return AlternatingTrainOneStepCell([network], [optimizer], DynamicLossScale(2.0**10), **keywords).set_train()


@quick_in_pynative_mode
def test_a_cycle_that_was_saved_without_copies_is_taken_back_to_where_it_was_loaded(mode):
    begun, resumed = (of_one(SpectralNorm(), gradient_accumulation_steps=2) for _ in range(2))
    begun(*batch(0))
    saved = {name: value for name, value in state(begun).items() if not name.startswith("forward_state.")}
    load_param_into_net(resumed, {name: Parameter(Tensor(value), name=name) for name, value in saved.items()})
    assert bool(resumed(*batch_for(True))[1].asnumpy())
    np.testing.assert_array_equal(state(resumed)["u"], saved["u"])


class Counting(nn.Cell):
    """Counts the samples that it has seen in a buffer."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 1)
        self.register_buffer("seen", Tensor(np.zeros(2, np.float32)))
        self.register_buffer("mask", Tensor(np.ones((1000, 1000), np.float32)))

    def construct(self, x, y):
        self.seen.copy_(self.seen + ops.ReduceMean()(x))
        return ops.square(self.dense(x * self.mask[0, :1]) - y).mean()


@pytest.mark.parametrize("steps", [2, *slow(1)])
def test_a_buffer(mode, steps):
    network = Counting()
    cell = of_one(network, gradient_accumulation_steps=steps)
    assert cell.forward_state_names() == ["buffer_0.seen"]
    for seed in range(steps):
        cell(*batch(seed))
    before, weights = buffers_of(network), state(cell)
    assert before["seen"].any()
    for seed in range(steps):
        assert bool(cell(*batch_for(seed == 0))[1].asnumpy())
    assert changed(before, buffers_of(network)) == set()
    moved = changed(weights, state(cell))
    assert {name for name in moved if not name.startswith("forward_state.")} == bookkeeping(moved)
    for seed in range(steps):
        cell(*batch(seed))
    assert changed(before, buffers_of(network)) == {"seen"}


class Backbone(nn.Cell):
    """Ten million frozen weights of a user's own cell, which nothing writes."""

    def __init__(self):
        super().__init__()
        self.large = Parameter(Tensor(np.zeros((10_000, 1000), np.float32)), name="large", requires_grad=False)
        self.head = nn.Dense(FEATURES, 1)

    def construct(self, x, y):
        return ops.square(self.head(x + self.large[0, :1]) - y).mean()


def test_frozen_weights_cost_nothing():
    assert of_one(Backbone()).forward_state_names() == []


class Undecided(Backbone):
    """Gives its frozen weights to a function whose source can't be read."""

    def construct(self, x, y):
        return UNREADABLE(self.large, x, y)


namespace = {}
exec("def also_unreadable(self, x, y):\n    return (x + self.large[0, 0] + self.u[0] - y).mean()", namespace)
exec("def unreadable(large, x, y):\n    return (x + large[0, 0] - y).mean()", namespace)
UNREADABLE = namespace["unreadable"]


def test_what_is_large_and_can_not_be_decided_is_named():
    network = Undecided()
    with pytest.warns(RuntimeWarning, match=r"can't be told whether the forward writes large, since .*forward_state="):
        cell = of_one(network)
    assert cell.forward_state_names() == []
    assert of_one(network, forward_state=[network.large]).forward_state_names() == ["large"]


class SeveralCounts(nn.Cell):
    """Cloned layers with buffers, one of which is in no list that MindSpore knows."""

    def __init__(self):
        super().__init__()
        counting = Counting()
        self.blocks = nn.CellList([copy.deepcopy(counting), copy.deepcopy(counting)])
        for i, block in enumerate(self.blocks):
            block.update_parameters_name(f"{i}.")
        self.plain = [Seen()]

    def construct(self, x, y):
        return self.blocks[0](x, y) + self.blocks[1](x, y) + self.plain[0](x)


class Seen(nn.Cell):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", Tensor(np.zeros(1, np.float32)))

    def construct(self, x):
        self.mean.copy_(ops.ReduceMean()(x).reshape((1,)))
        return ops.ReduceMean()(x)


@quick_in_pynative_mode
def test_buffers_of_clones_and_of_cells_that_are_registered_nowhere(mode):
    network = SeveralCounts()
    cell = of_one(network)
    # The numbers are in checkpoints from within a cycle.
    names = ["buffer_0.blocks.1.seen", "buffer_1.blocks.0.seen", "buffer_2.unregistered.mean"]
    assert cell.forward_state_names() == names
    cell(*batch(0))
    before, mean = buffers_of(network), network.plain[0].mean.asnumpy().copy()
    assert bool(cell(*batch_for(True))[1].asnumpy())
    assert changed(before, buffers_of(network)) == set()
    np.testing.assert_array_equal(network.plain[0].mean.asnumpy(), mean)


class Holding(nn.Cell):
    """Calls what is not registered anywhere."""

    def __init__(self, held):
        super().__init__()
        self.head, self.held = nn.Dense(FEATURES, 1), held

    def construct(self, x, y):
        return ops.square(self.head(self.held(x)) - y).mean()


def in_a_closure():
    memory = Parameter(Tensor(0.0), name="memory", requires_grad=False)
    return lambda x: ops.depend(x, ops.assign(memory, ops.ReduceMean()(x)))


class InASlot:
    __slots__ = ("memory",)

    def __init__(self):
        self.memory = Parameter(Tensor(0.0), name="memory", requires_grad=False)

    def __call__(self, x):
        return ops.depend(x, ops.assign(self.memory, ops.ReduceMean()(x)))


class InAHook(nn.Cell):
    """Only the hook of a weight knows it."""

    def __init__(self):
        super().__init__()
        memory = Parameter(Tensor(0.0), name="memory", requires_grad=False)
        self.gain = Parameter(Tensor(1.0), name="gain")
        self.gain.register_hook(lambda gradient: ops.depend(gradient, ops.assign(memory, gradient)))

    def construct(self, x):
        return x * self.gain


@pytest.mark.parametrize("make", [in_a_closure, InASlot, InAHook])
def test_what_is_kept_in_other_ways_is_found(make):
    network = Holding(make())
    with pytest.warns(RuntimeWarning, match="memory can be written by the forward, but MindSpore does not find"):
        assert of_one(network).forward_state_names() == ["unregistered_0.memory"]


@quick_in_graph_mode
@pytest.mark.parametrize("steps", [2, *slow(1)])
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_a_buffer_that_was_given_other_memory(mode, steps, when):
    network = Counting()
    cell = of_one(network, gradient_accumulation_steps=steps)
    loaded = Tensor(np.array([2.0, 3.0], np.float32))
    for give in (when != "later", when == "later"):
        if give:
            network.seen.assign_value(Tensor(loaded.asnumpy()))
        before = buffers_of(network)
        for seed in range(steps):
            assert bool(cell(*batch_for(seed == 0))[1].asnumpy())
        assert changed(before, buffers_of(network)) == set()
    np.testing.assert_array_equal(network.seen.asnumpy(), loaded.asnumpy())


@quick_in_pynative_mode
def test_state_outside_of_the_networks_is_in_the_checkpoint(mode):
    network = SpectralNorm()
    outside = Parameter(Tensor(np.zeros(2, np.float32)), name="outside", requires_grad=False)
    cell = of_one(network, forward_state=[outside])
    assert {"outside", "u"} <= set(cell.parameters_dict())
    assert sorted(cell.forward_state_names()) == ["frozen", "outside", "u"]


def test_of_what_can_not_be_decided_the_small_is_taken_back():
    network = Undecided()
    network.u = Parameter(Tensor(np.zeros(4, np.float32)), name="u", requires_grad=False)
    network.construct = types.MethodType(namespace["also_unreadable"], network)
    with pytest.warns(RuntimeWarning, match="the forward writes large, since"):
        assert of_one(network).forward_state_names() == ["u", "head.weight", "head.bias"]


class ModuleThatRaises(type):
    @property
    def __module__(cls):
        raise AssertionError("a property of the user's was run")


class ModuleOfTheMetaclass(type):
    """As Cython 3.3 compiles a metaclass: what is read as its module is no string."""

    __module__ = type.__dict__["__module__"]


class HeldByStrangeClasses(SpectralNorm):
    def __init__(self):
        super().__init__()
        self.held = []
        for metaclass in (ModuleThatRaises, ModuleOfTheMetaclass):
            self.held.append(metaclass("Holder", (), {"__module__": 5})())
            self.held[-1].loose = Parameter(Tensor(np.ones(FEATURES)), name=metaclass.__name__, requires_grad=False)


def test_classes_whose_module_is_no_string():
    with pytest.warns(RuntimeWarning, match="no checkpoint has them"):
        names = of_one(HeldByStrangeClasses()).forward_state_names()
    assert names == ["u", "frozen", "unregistered_0.ModuleThatRaises", "unregistered_1.ModuleOfTheMetaclass"]


class SettingAnAttribute(nn.Cell):
    """Sets attributes of an object that is no Cell; one is a property, which MindSpore sets in the first call only."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((FEATURES, 1), np.float32)), name="weight")
        self.u = Parameter(Tensor(np.ones(FEATURES, np.float32)), name="u", requires_grad=False)
        self.holder = Holder(self.u)

    def construct(self, x, y):
        self.holder.value = ops.stop_gradient(x).mean(0)
        return ops.matmul(x, self.weight).mean()


@quick_in_graph_mode
@pytest.mark.parametrize("make", [of_one, *slow(of_each)])
def test_a_setter_runs_in_graph_mode(mode, make):
    """MindSpore once ended such a step with "The input_data does not have a valid ptr of actor"."""
    network = SettingAnAttribute()
    cell = make(network)
    for seed, is_skipped in enumerate((True, False)):
        before = network.u.asnumpy().copy()
        assert bool(cell(*(batch_for(True) if is_skipped else batch(seed)))[1].asnumpy()) == is_skipped
        if is_skipped:
            np.testing.assert_array_equal(network.u.asnumpy(), before)


class NamedAlike(nn.Cell):
    """Has unseen state with names that are not unique, or that the optimizer's state has."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, FEATURES)
        self.norms = [nn.BatchNorm1d(FEATURES).set_train() for _ in range(2)]
        self.rates = [types.SimpleNamespace(rate=self._rate()) for _ in range(2)]

    def _rate(self):
        return Parameter(Tensor(np.ones(1, np.float32)), name="learning_rate", requires_grad=False)

    def construct(self, x, y):
        x = self.dense(x)
        for norm, its in zip(self.norms, self.rates):
            x = norm(x + 1)
            ops.assign(its.rate, its.rate * 0.5 + x.sum())
        return ops.square(x - y).mean()

    def values(self):
        norms = [norm.moving_mean for norm in self.norms] + [norm.moving_variance for norm in self.norms]
        return {i: each.asnumpy().copy() for i, each in enumerate([*norms, *(its.rate for its in self.rates)])}


# Graph mode mixes two Parameters of one name up, or refuses them.
@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_unseen_state_of_one_name(mode, steps):
    network = NamedAlike()
    cell = of_one(network, gradient_accumulation_steps=steps)
    assert len(set(cell.forward_state_names())) == 6
    for overflow in (False, True, False, True):
        before = network.values()
        for seed in range(steps):
            cell(*batch_for(overflow, seed))
        assert len(changed(before, network.values())) == (0 if overflow else 6)
