"""
Checks that a step is a transaction, either all of it or only the loss scale and counters, wherever it happens: around a
backward of the user's own, after a checkpoint, in a loop on the device, on several ranks; and that it costs little.
"""

import tempfile

import mindspore
import numpy as np
from mindspore import Tensor, communication, jit, nn
from mindspore.dataset import NumpySlicesDataset

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell, ShardedOptimizer
from ms_lossscale._mindspore import compiled_operators
from ms_lossscale.selfcheck import networks as nets
from ms_lossscale.selfcheck.claim import check, differing, expect, expect_equal, values
from ms_lossscale.selfcheck.networks import BACKWARD, LOSS_SCALE, SIZE

# Names of what a step changes, and beginnings of the names of what a skipped one may change. The last is for
# `grad_norm()`, the norm of the gradients that were checked last.
MOVE = ("dense.weight", "norm.moving_mean", "calls", "adam_m.dense.weight", "ema.dense.weight")
MAY_MOVE = ("loss_scale.", "step_counters.", "clipping.")
# The steps of a loop.
STEPS = 6


def _expect_transactions(cell, step, pattern):
    """Makes a step for each entry of the pattern. It overflows, and then leaves every Parameter, or moves all."""
    for i, overflows in enumerate(pattern):
        before = values(cell)
        expect_equal(bool(step(*nets.normalised_batch(i, overflows))), overflows, f"whether step {i} overflowed")
        moved = [name for name in differing(values(cell), before) if not name.startswith(MAY_MOVE)]
        stayed = [name for name in MOVE if name not in moved]
        expect_equal(moved if overflows else stayed, [], f"what step {i} {'changed' if overflows else 'left'}")
    expect_equal(cell.counters()["skipped_steps"], sum(pattern), "the steps that were skipped")


@check(quick=True)
def a_skipped_step_leaves_every_parameter(device):
    """A skipped step changes no Parameter: weights, optimizer, learning rate, BatchNorm, averages. Others move all."""
    network, settings = nets.Normalised(device), {"clip_norm": 1.0, "ema_decay": 0.9}
    cell = ScaledTrainOneStepCell(network, nets.adam(network), DynamicLossScale(16.0), **settings).set_train()
    _expect_transactions(cell, lambda *inputs: cell(*inputs)[1], [False, True, True, True, False])


@check()
def a_step_around_ones_own_backward_is_a_transaction(device):
    """A ManualStep finds the overflow of its own forward and backward and no earlier one, and then restores all."""
    network, others = nets.Normalised(device), nets.Products(device, prefix="other.")
    step = ManualStep(network, nets.adam(network), DynamicLossScale(2.0**4), ema_decay=0.9)
    step.set_train()

    def forward(x, factor):
        return step.scale(network(x, factor))

    def train_step(x, factor):
        x, factor = step.begin(x, factor)
        return step.end(mindspore.grad(forward, None, step.parameters)(x, factor))

    # As users write it: in graph mode there is no other way to compile it.
    compiled = jit(train_step) if device.mode == "graph" else train_step

    def after_others(*inputs):
        # What overflows before a step is not the step's. Reading it makes sure that it has happened.
        others(*nets.inputs_with(nets.FORWARD)).asnumpy()
        return compiled(*inputs)

    _expect_transactions(step, after_others, [False, True, True, False, True, False])


def _train(cell, steps):
    for step in steps:
        x, y = nets.linear_batch(step)
        cell(x * float("inf" if step == 5 else 1), y)
    return values(cell)


@check()
def a_checkpoint_continues_bit_for_bit(device):
    """A checkpoint from within an accumulation cycle continues bit for bit, in a new cell and in a running one."""
    settings = {"gradient_accumulation_steps": 2, "clip_norm": 1.0, "ema_decay": 0.9}
    cell, new, old = (nets.linear_cell(i, DynamicLossScale(256.0, scale_window=2), **settings) for i in range(3))
    _train(old, range(20, 25))
    _train(cell, range(3))
    with tempfile.TemporaryDirectory() as folder:
        mindspore.save_checkpoint(cell, f"{folder}/cell.ckpt")
        saved = mindspore.load_checkpoint(f"{folder}/cell.ckpt")
    expected = _train(cell, range(3, 10))
    for resumed, which in ((new, "a new cell"), (old, "one that has made steps of its own")):
        resumed.load_state_dict(saved)
        differs = differing(_train(resumed, range(3, 10)), expected)
        expect_equal(differs, [], f"what differs after seven more calls of {which}")


def _expect_no_host_reads(cell, *inputs):
    """Calls a cell or function, and expects that the host reads no values of tensors meanwhile."""
    names = ("asnumpy", "item", "__bool__", "__float__", "__int__")
    reads, originals = [], {name: getattr(Tensor, name) for name in names}
    for name, read in originals.items():
        setattr(Tensor, name, lambda tensor, *args, n=name, r=read: (reads.append(n), r(tensor, *args))[1])
    try:
        cell(*inputs)
    finally:
        for name, read in originals.items():
            setattr(Tensor, name, read)
    expect_equal(reads, [], "by what the host reads values in a step or loop")


def _cell():
    return nets.linear_cell(0, DynamicLossScale(2.0**10, scale_window=4))


def _expect_steps(cell, steps, what):
    """Expects that a cell has made as many steps."""
    expected, batch = _cell(), nets.linear_batch(0)
    for _ in range(steps):
        expected(*batch)
    expect_equal(differing(values(cell), values(expected)), [], f"what differs between {what} and as many calls")


def _expect_a_loop(steps, cell, *inputs):
    """Expects that a compiled loop makes the same steps, and that the host waits for none."""
    steps(*inputs)
    # The first call compiled.
    _expect_no_host_reads(steps, *inputs)
    _expect_steps(cell, 2 * STEPS, "a compiled loop, twice,")


@check()
def a_compiled_for_loop_makes_the_same_steps(device):
    """A `for` loop under `mindspore.jit` makes the same steps, bit for bit, and the host reads nothing in it."""
    cell = _cell()

    @jit
    def steps(x, y):
        loss = 0.0
        for _ in range(STEPS):
            loss = cell(x, y)[0]
        return loss

    _expect_a_loop(steps, cell, *nets.linear_batch(0))


@check()
def a_compiled_while_loop_makes_the_same_steps(device):
    """A `while` loop under `mindspore.jit` makes the same steps, bit for bit, and the host reads nothing in it."""
    cell = _cell()

    @jit
    def steps(x, y, count):
        loss = x.sum()
        while count > 0:
            loss = cell(x, y)[0]
            count = count - 1
        return loss

    _expect_a_loop(steps, cell, *nets.linear_batch(0), Tensor(STEPS))


@check()
def sink_mode_makes_the_same_steps(device):
    """`Model.train` with `dataset_sink_mode=True` makes the same steps, bit for bit."""
    cell, batch = _cell(), tuple(np.tile(each.asnumpy(), (STEPS, 1)) for each in nets.linear_batch(0))
    batches = NumpySlicesDataset(batch, shuffle=False).batch(len(batch[0]) // STEPS)
    mindspore.Model(cell).train(1, batches, dataset_sink_mode=True)
    _expect_steps(cell, STEPS, "Model.train in sink mode")


@check()
def a_step_costs_little_more_than_an_unscaled_one(device):
    """A step with dynamic scale, clipping and averages runs the network once, and nothing in it waits for the host."""
    networks, batch = [nets.Normalised(device) for _ in range(2)], nets.normalised_batch(0, False)
    stock = nn.TrainOneStepCell(networks[0], nets.adam(networks[0])).set_train()
    settings = {"loss_scale": DynamicLossScale(16.0), "clip_norm": 1.0, "ema_decay": 0.999}
    scaled = ScaledTrainOneStepCell(networks[1], nets.adam(networks[1]), **settings).set_train()
    for cell in (stock, scaled):
        cell(*batch)
    _expect_no_host_reads(scaled, *batch)
    expect_equal(int(networks[1].calls), 2, "runs of the network in two steps")
    if device.mode == "graph":
        stock, scaled = compiled_operators(stock), compiled_operators(scaled)
        expect_equal(scaled["MatMul"], stock["MatMul"], "operators MatMul of a step, compared with the unscaled one")
        added = scaled.total() - stock.total()
        # Most of them come once for all weights.
        expect(added <= 64, f"a step has {added} operators more than the unscaled one, instead of at most 64")


@check("has_ranks", quick=True)
def an_overflow_on_one_rank_skips_the_step_on_all(device):
    """Whichever rank overflows, all ranks skip the step, and afterwards hold the same weights and loss scale."""
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    cell, ranks, rank = nets.cell_of_products(device), communication.get_group_size(), communication.get_rank()
    for overflowing in range(ranks):
        overflows = nets.skips(cell, *nets.inputs_with(BACKWARD if rank == overflowing else 1.0))
        # The next rank has the opposite sign, so that weights differ if gradients are not exchanged.
        found = [overflows, nets.skips(cell, *nets.inputs_with(0.001 * (-1) ** rank))]
        expect_equal(found, [True, False], f"whether rank {rank} skips rank {overflowing}'s overflow, and another step")
    state = Tensor([*(float(weight[0]) for weight in cell.network.weights), cell.get_loss_scale()])
    of_all = mindspore.ops.AllReduce()(state) / ranks
    expect(bool((of_all == state).all()), "the ranks hold different weights or loss scales")
    expect_equal(cell.counters()["skipped_steps"], ranks, "the steps that were skipped")


@check("has_ranks")
def sharing_the_optimizers_state_changes_no_weight(device):
    """Ranks that share the optimizer's state hold the weights of ranks that do not, bit for bit, and its nth part."""
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    networks = [nets.Products(device), nets.Products(device)]
    plain = nn.AdamWeightDecay(networks[0].weights, 0.01)
    sharded = ShardedOptimizer(networks[1].weights, lambda weights: nn.AdamWeightDecay(weights, 0.01))
    pairs, rank = zip(networks, (plain, sharded)), communication.get_rank()
    cells = [ScaledTrainOneStepCell(*pair, LOSS_SCALE, clip_norm=0.5).set_train() for pair in pairs]
    # Each element moves differently, and each rank has other numbers.
    x = Tensor(np.linspace(-0.1, 0.2, SIZE, dtype=np.float32) * (1 + rank))
    for factor, overflows in ((1.0, False), (1e6 if rank == 0 else 1.0, True), (-0.5, False), (2.0, False)):
        skipped = [nets.skips(cell, *[x * factor] * 3) for cell in cells]
        expect_equal(skipped, [overflows] * 2, "whether a step was skipped, without and with sharing")
    actual, wanted = (np.stack([weight.asnumpy() for weight in network.weights]) for network in networks[::-1])
    expect_equal(actual.tolist(), wanted.tolist(), "the ranks hold different weights with a shared state")
    size, part = (sum(moment.size for moment in optimizer.moments1) for optimizer in (plain, sharded.optimizer))
    share = -(-SIZE // communication.get_group_size()) / SIZE
    expect_equal(part, share * size, "the elements of a rank's part of a moment")
