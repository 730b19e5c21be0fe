"""On one rank a ShardedOptimizer updates float32 masters of float16 weights, which then train as float32 ones do."""

import mindspore
import numpy as np
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.held_cells import Holder
from support.networks import FEATURES
from support.sharded_training import HalfMlp, half_cell, plain
from support.training import changed, same_bits, state

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    ShardedOptimizer,
    merge_shards,
)

MASTERS = {f"master.{name}" for name in ("hidden.weight", "hidden.beta", "output.weight", "output.bias")}
# With the last one, gradients are below the smallest float16, but not times the scale.
SIZES = (1.0, np.inf, 1.0, 2.0**-22)


def inputs_of(size):  # The loss is as large as `size`.
    x = np.random.default_rng(0).normal(size=(8, FEATURES)).astype(np.float32)
    return Tensor(x), Tensor(x.sum(1)), Tensor(np.full(8, size, np.float32))


def of_weight(master):
    return master.replace("master.", "")


def assert_trained_alike(control, cell):  # As float32 weights that the forward rounds.
    for name, value in state(cell).items():
        expected = state(control)[of_weight(name)]
        assert same_bits(value, expected.astype(value.dtype)), name


def test_float16_weights_train_as_float32_ones_do(mode):
    cells = [half_cell(optimizer).set_train() for optimizer in (plain, ShardedOptimizer)]
    control, cell = cells
    assert state(cell).keys() - state(control).keys() == MASTERS
    for size in SIZES:
        before = state(cell)
        outputs = [each(*inputs_of(size)) for each in cells]
        assert all(same_bits(*(value.asnumpy() for value in pair)) for pair in zip(*outputs))
        assert_trained_alike(control, cell)
        moved = MASTERS & changed(before, state(cell))
        assert moved == (MASTERS if np.isfinite(size) else set())
    # What something else has written into a weight is taken over.
    for each in cells:
        ops.assign(each.network.hidden, ops.ones_like(each.network.hidden))
        each(*inputs_of(1.0))
    assert_trained_alike(control, cell)


@quick_in_graph_mode
def test_their_checkpoint_is_that_of_merged_ranks(mode):
    cell = half_cell(ShardedOptimizer).set_train()
    cell(*inputs_of(1.0))
    mindspore.save_checkpoint(cell, "cell.ckpt")
    saved = mindspore.load_checkpoint("cell.ckpt")
    assert merge_shards(["cell.ckpt"]).keys() == saved.keys()
    assert half_cell(plain).load_state_dict(saved) == ([], [])

    resumed = half_cell(ShardedOptimizer)
    assert resumed.load_state_dict(saved) == ([], [])
    assert changed(state(cell), state(resumed)) == set()
    # Of a plain optimizer's, the masters begin with the weights.
    plain_ones = {name: value for name, value in saved.items() if name not in MASTERS}
    assert resumed.load_state_dict(plain_ones) == ([], [])
    for name in MASTERS:
        assert same_bits(state(resumed)[name], state(cell)[of_weight(name)].astype(np.float32))


def held_cell(optimizer):  # Its loss renames the weights once the optimizer is made.
    network = half_cell(plain).network if optimizer is plain else HalfMlp(dtype=np.float16)
    trained = optimizer(network.trainable_params(), lambda weights: nn.Momentum(weights, 0.1, 0.9))
    cell = ScaledTrainOneStepCell(nn.SequentialCell(network), trained, DynamicLossScale())
    Holder(cell)
    return cell


@quick_in_pynative_mode
def test_of_a_held_cell_they_have_the_names_of_the_weights_after_the_holders(mode):
    cell, control = held_cell(ShardedOptimizer), held_cell(plain)
    halves = [weight.name for weight in cell.network.trainable_params() if weight.dtype == mstype.float16]
    masters = {name.replace("critic_train.", "critic_train.master.") for name in halves}
    assert len(masters) == 4 and cell.parameters_dict().keys() - control.parameters_dict().keys() == masters
    saved = {name: Parameter(value, name=name) for name, value in cell.parameters_dict().items()}
    assert merge_shards([saved]).keys() == saved.keys()
    assert control.load_state_dict(saved) == ([], [])
    assert held_cell(ShardedOptimizer).load_state_dict(saved) == ([], [])


@quick_in_graph_mode
def test_masters_of_several_optimizers_have_the_names_of_their_weights(mode):
    networks = [HalfMlp(seed, dtype=np.float16, prefix=f"{seed}.") for seed in range(2)]
    optimizers = [
        ShardedOptimizer(network.trainable_params(), lambda weights: nn.Momentum(weights, 0.1, 0.9))
        for network in networks
    ]
    cell = AlternatingTrainOneStepCell(networks, optimizers, DynamicLossScale())
    parameters = cell.parameters_dict()
    masters = {f"master.{i}.{of_weight(name)}" for name in MASTERS for i in range(2)}
    assert {name for name in parameters if "master" in name} == masters
    assert "optimizer_1.moments.1.hidden.weight" in parameters
    assert cell.load_state_dict({name: parameters[name] for name in parameters.keys() - masters}) == ([], [])


def test_a_gradient_beyond_float16_is_none_of_theirs(mode):
    network = HalfMlp(dtype=np.float16)
    before = state(network)
    optimizer = ShardedOptimizer(network.trainable_params(), lambda weights: nn.SGD(weights, 2.0**-24))
    cell = ScaledTrainOneStepCell(network, optimizer, 2.0**-12).set_train()
    assert not cell(*inputs_of(2.0**20))[1]
    moved = state(cell)["master.hidden.weight"] - before["hidden.weight"]
    assert np.abs(moved).max() > 65504 * 2.0**-24
