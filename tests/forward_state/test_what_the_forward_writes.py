"""What a skipped step restores: what MindSpore registers and nobody trains, and what the user names."""

import collections
import copy
import warnings

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore import dtype as mstype
from support.networks import FEATURES, Linear, Normalised, batch, batch_for
from support.training import KINDS, bookkeeping, by_sgd, changed, state, stepping

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell

LIMIT = 10**6


def frozen(name, *shape, value=1.0):
    return Parameter(Tensor(np.full(shape, value, np.float32)), name=name, requires_grad=False)


def buffers_of(network):
    return {name: buffer.asnumpy().copy() for name, buffer in network.named_buffers()}


def of_one(network, weights=None, **keywords):
    weights = network.trainable_params() if weights is None else weights
    optimizer = nn.Momentum(weights, 0.01, 0.9)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()


class PowerIteration(nn.Cell):
    """Follows its inputs with `u`. A frozen factor beside it is only read."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(FEATURES, 1)
        self.u, self.factor = frozen("u", FEATURES), frozen("factor", FEATURES)

    def construct(self, x, y):
        ops.assign(self.u, self.u * 0.5 + ops.ReduceMean()(x, 0))
        return ops.square(self.head(x * self.factor) - y).mean()


class Backbone(nn.Cell):
    """Holds so many frozen values, in Parameters of these sizes, none of which it writes."""

    def __init__(self, *sizes):
        super().__init__()
        for i, size in enumerate(sizes):
            setattr(self, f"held_{i}", frozen(f"held_{i}", size))
        self.head = nn.Dense(FEATURES, 1)

    def construct(self, x, y):
        return ops.square(self.head(x + self.held_0[0]) - y).mean()


@pytest.mark.parametrize(
    "sizes, restored",
    [((LIMIT,), [0]), ((LIMIT + 1,), []), ((LIMIT - 7, 7), [0, 1]), ((LIMIT - 7, 8), [1]), ((3, LIMIT, 2), [0, 2])],
)
def test_the_smallest_first_up_to_a_million_values(sizes, restored):
    assert of_one(Backbone(*sizes)).forward_state_names() == [f"held_{i}" for i in restored]


def test_of_mindspores_layers_the_statistics_of_any_size_and_no_weights():
    layers = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(LIMIT), nn.Embedding(3, 4), nn.LayerNorm([4]))
    for parameter in layers.get_parameters():
        parameter.requires_grad = False
    head = nn.Dense(4, 1)
    network = nn.WithLossCell(nn.SequentialCell(layers, head), nn.MSELoss())
    for named in ([], [layers[0].weight]):
        cell = of_one(network, head.trainable_params(), forward_state=named)
        names = sorted(name.split(".")[-1] for name in cell.forward_state_names())
        assert names == ["moving_mean", "moving_variance", *["weight"] * len(named)]


class InAList(nn.Cell):
    """Holds a Parameter where MindSpore does not look."""

    def __init__(self):
        super().__init__()
        self.head, self.memories = nn.Dense(FEATURES, 1), [frozen("listed", FEATURES)]

    def construct(self, x, y):
        ops.assign(self.memories[0], self.memories[0] * 0.5 + ops.ReduceMean()(x, 0))
        return ops.square(self.head(x) - y).mean()


@quick_in_pynative_mode
def test_what_mindspore_does_not_find_is_warned_of_and_restored_if_it_is_named(mode):
    network = InAList()
    (memory,), outside, large = network.memories, frozen("outside", 2), frozen("large", LIMIT + 1)
    with pytest.warns(RuntimeWarning, match="MindSpore does not find") as warned:
        of_one(network)
    assert len(warned) == 1
    cell = of_one(network, forward_state=[memory, outside, large])
    assert {"listed", "outside", "large"} <= set(cell.parameters_dict())
    assert sorted(cell.forward_state_names()) == ["large", "listed", "outside"]
    cell(*batch(0))
    before = memory.asnumpy().copy()
    assert bool(cell(*batch_for(True))[1])
    np.testing.assert_array_equal(memory.asnumpy(), before)
    cell(*batch(1))
    assert not np.array_equal(memory.asnumpy(), before)


class OwnList(list):
    def __iter__(self):
        raise AssertionError("Code of the user's runs.")


class Holding(nn.Cell):
    def __init__(self, hold):
        super().__init__()
        self.head = nn.Dense(FEATURES, 1)
        self.held = hold(self.head)

    def construct(self, x, y):
        return ops.square(self.head(x) - y).mean()


DENSE = nn.Dense(2, 2)
HIDDEN = {
    "list_in_a_list": lambda _: [[DENSE]],
    "list_in_a_dict": lambda _: {"cells": [DENSE]},
    "dict_in_a_tuple": lambda _: ({"cell": DENSE},),
    "parameters_in_a_list": lambda _: [ParameterTuple([frozen("listed", 2)])],
    "deeper": lambda _: collections.OrderedDict(a=[{"b": [None, DENSE]}]),
    "own_list": lambda _: [OwnList([DENSE])],
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_lists_within_lists_and_dicts_hold_is_warned_of(name):
    with pytest.warns(RuntimeWarning, match=r"does not find .* in the \w+ 'held' of Holding") as warned:
        of_one(Holding(HIDDEN[name]))
    assert len(warned) == 1


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_declared_is_not_warned_of(name):
    network = Holding(HIDDEN[name])
    declared = network.held[0][0] if name == "parameters_in_a_list" else DENSE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell = of_one(network, forward_state=[declared])
    names = [declared.name] if name == "parameters_in_a_list" else ["weight", "bias"]
    assert cell.forward_state_names() == names
    # Not all of it.
    if name != "parameters_in_a_list":
        with pytest.warns(RuntimeWarning, match="does not find"):
            of_one(network, forward_state=[DENSE.weight])


def itself(head):
    held = [head, {"weight": head.weight}, [[head]], "text", 1]
    held.append(held)
    return held


@pytest.mark.parametrize("hold", [itself, lambda head: ParameterTuple([head.weight]), lambda head: nn.CellList([head])])
def test_what_mindspore_finds_elsewhere_may_be_in_a_list_too(hold):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_one(nn.SequentialCell(Holding(hold)))


class Counting(nn.Cell):
    """Counts the samples that it has seen in a buffer. A large one is constant."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 1)
        self.register_buffer("seen", Tensor(np.zeros(2, np.float32)))
        self.register_buffer("mask", Tensor(np.ones(LIMIT, np.float32)))

    def construct(self, x, y):
        self.seen.copy_(self.seen + ops.ReduceMean()(x))
        return ops.square(self.dense(x * self.mask[0]) - y).mean()


class Clones(nn.Cell):
    def __init__(self):
        super().__init__()
        counting = Counting()
        self.blocks = nn.CellList([copy.deepcopy(counting), copy.deepcopy(counting)])
        for i, block in enumerate(self.blocks):
            block.update_parameters_name(f"{i}.")

    def construct(self, x, y):
        return self.blocks[0](x, y) + self.blocks[1](x, y)


@pytest.mark.parametrize("steps", [2, *slow(1)])
def test_buffers_of_clones(mode, steps):
    network = Clones()
    cell = of_one(network, gradient_accumulation_steps=steps)
    names = cell.forward_state_names()
    assert len(set(names)) == 2 and all(name.endswith("seen") for name in names)
    for seed in range(steps):
        cell(*batch(seed))
    before, weights = buffers_of(network), state(cell)
    assert before["blocks.0.seen"].any()
    for seed in range(steps):
        assert bool(cell(*batch_for(seed == 0))[1].asnumpy())
    assert changed(before, buffers_of(network)) == set()
    moved = changed(weights, state(cell))
    assert {name for name in moved if not name.startswith("forward_state.")} == bookkeeping(moved)
    for seed in range(steps):
        cell(*batch(seed))
    assert changed(before, buffers_of(network)) == {"blocks.0.seen", "blocks.1.seen"}


@quick_in_graph_mode
@pytest.mark.parametrize("steps", [2, *slow(1)])
@pytest.mark.parametrize("when", ["before the first step", *slow("later")])
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


@pytest.mark.parametrize("kind", ["scaled", *slow("alternating", "manual")])
def test_what_a_function_and_its_cells_write(mode, kind):
    """It moves what it reaches: a cell's and its own."""
    network, memory = PowerIteration(), frozen("its_memory", FEATURES)

    def forward(x, y):
        ops.assign(memory, memory * 0.5 + ops.ReduceMean()(x, 0))
        return network(x, y)

    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    arguments = ([forward], [optimizer]) if kind == "alternating" else (forward, optimizer)
    cell = KINDS[kind](*arguments, DynamicLossScale(2.0**10)).set_train()
    assert sorted(cell.forward_state_names()) == ["factor", "its_memory", "u"]
    assert {"its_memory", "u", "head.weight"} <= set(cell.parameters_dict())
    call = stepping(cell, forward) if kind == "manual" else cell

    def values():
        return {**state(network), "memory": memory.asnumpy().copy()}

    call(*batch(0))
    before = values()
    assert np.all(call(*batch_for(True))[1].asnumpy())
    assert not changed(before, values())
    assert not np.any(call(*batch(1))[1].asnumpy())
    assert changed(before, values()) == {"u", "memory", "head.weight", "head.bias"}


@quick_in_pynative_mode
def test_batch_norm_of_mint(mode):
    network = Normalised(mint.nn.BatchNorm1d(FEATURES))
    try:
        network.set_train()(*batch()).asnumpy()
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"mint.nn.BatchNorm1d does not run here: {str(error).strip().splitlines()[0]}")
    network = Normalised(mint.nn.BatchNorm1d(FEATURES))
    cell = of_one(network)
    start = state(cell)
    cell(*batch())
    before = state(cell)
    moved = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed(start, before) > {"weight", *moved}
    assert bool(cell(*batch_for(True))[1])
    assert changed(before, state(cell)) == bookkeeping(changed(before, state(cell)))
    assert not bool(cell(*batch(seed=1))[1])
    assert changed(before, state(cell)) > moved


class Observer(nn.Cell):
    """The range of its inputs, which begins infinite."""

    def __init__(self):
        super().__init__()
        self.score = nn.Dense(FEATURES, 1)
        self.low = Parameter(Tensor(np.float32(np.inf)), name="low", requires_grad=False)
        self.lowest = Tensor(np.float32(-np.inf))
        self.high = Parameter(Tensor(np.full(2, -np.inf, np.float32)), name="high", requires_grad=False)

    def construct(self, x, y):
        ops.assign(self.low, ops.minimum(self.low, ops.ReduceMin()(x)))
        # Its second element is never written.
        ops.assign(self.high, ops.maximum(self.high, ops.stack((ops.ReduceMax()(x), self.lowest))))
        return ops.square(self.score(ops.clamp(x, -1.0, 1.0)) - y).mean()


@quick_in_graph_mode
def test_what_was_not_finite_before_is_no_overflow(mode):
    network = Observer()
    cell = of_one(network, network.score.trainable_params(), forward_state=[network.low, network.high])
    assert not bool(cell(*batch(0))[1].asnumpy())
    high = network.high.asnumpy().copy()
    assert np.isfinite(high[0])
    x, y = (tensor.asnumpy() for tensor in batch(0))
    x[1, 1] = np.inf
    assert bool(cell(Tensor(x), Tensor(y))[1].asnumpy())
    np.testing.assert_array_equal(network.high.asnumpy(), high)
    assert not bool(cell(*batch(1))[1].asnumpy())


class Replaces(Linear):
    """Sets a Parameter as an attribute, which PyNative mode gives other memory."""

    def __init__(self):
        super().__init__()
        self.sum = Parameter(Tensor(0.0), name="sum", requires_grad=False)

    def construct(self, x, y, added):
        self.sum = self.sum + added
        return super().construct(x, y)


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "keywords",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2, "drop_overflowed_calls": True}],
    ids=["", "cycle", "drops"],
)
def test_a_manual_step_undoes_what_a_training_cell_does(mode, keywords):
    network, control = Replaces(), Replaces()
    step = ManualStep(network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(), **keywords)
    cell = by_sgd(control, DynamicLossScale(), 0.1, **keywords)
    value_and_grad = step.value_and_grad(network)
    x, y = batch(0)
    for factor, added in ((1.0, 1.0), (np.inf, 5.0), (1.0, 1.0), (1.0, np.nan), (1.0, 1.0), (1.0, 1.0)):
        inputs = factor * x, y, Tensor(added, mstype.float32)
        cell(*inputs)
        step.end(value_and_grad(*step.begin(*inputs))[1])
        for name in ("sum", "weight"):
            np.testing.assert_array_equal(getattr(network, name).asnumpy(), getattr(control, name).asnumpy())
    assert np.isfinite(network.sum.asnumpy())
