"""Whether ranks decide together: only under `msrun`."""

import contextlib

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, ShardedOptimizer
from ms_lossscale.selfcheck.claim import check, expect, expect_equal
from ms_lossscale.selfcheck.networks import BACKWARD_OVERFLOWS, LOSS_SCALE, SIZE, Products, cell_of_products, inputs


@contextlib.contextmanager
def _data_parallel():
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    try:
        yield
    finally:
        mindspore.reset_auto_parallel_context()


@check("has_ranks", quick=True)
def an_overflow_on_one_rank_skips_the_step_on_all(device):
    """Whichever rank overflows, all ranks skip the step, and afterwards hold the same weights and loss scale."""
    with _data_parallel():
        cell = cell_of_products(device)
    for overflowing in range(get_group_size()):
        value = BACKWARD_OVERFLOWS if get_rank() == overflowing else 1.0
        expect(
            bool(cell(*inputs(1.0, value, 1.0))[1]), f"rank {get_rank()} went on where rank {overflowing} overflowed"
        )
        # Of another sign on the next rank, so that weights part where gradients are not exchanged.
        own = 0.001 * (-1) ** get_rank()
        expect(not bool(cell(*inputs(1.0, own, 1.0))[1]), "a step after it was skipped, too")
    state = np.concatenate([*(weight.asnumpy() for weight in cell.network.weights), [cell.get_loss_scale()]])
    state = state.astype(np.float32)
    of_all = mindspore.ops.AllReduce()(Tensor(state)).asnumpy() / get_group_size()
    expect(np.array_equal(of_all, state), "the ranks hold different weights or loss scales")
    expect_equal(cell.counters()["skipped_steps"], get_group_size(), "the steps that were skipped")


def _adam(weights):
    return nn.AdamWeightDecay(weights, learning_rate=0.01)


@check("has_ranks")
def sharing_the_optimizers_state_changes_no_weight(device):
    """Ranks that share the optimizer's state hold the weights of ranks that do not, bit for bit, and its nth part."""
    networks = Products(device), Products(device)
    with _data_parallel():
        plain = _adam(networks[0].trainable_params())
        sharded = ShardedOptimizer(networks[1].trainable_params(), _adam)
        cells = [
            ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(LOSS_SCALE), clip_norm=0.5).set_train()
            for network, optimizer in zip(networks, (plain, sharded))
        ]
    # Each element goes another way, and each rank sees other numbers.
    x = np.linspace(-0.1, 0.2, SIZE, dtype=np.float32) * (1 + get_rank())
    for factor in (1.0, BACKWARD_OVERFLOWS if get_rank() == 0 else 1.0, -0.5, 2.0):
        overflow = factor == BACKWARD_OVERFLOWS
        values = [Tensor(np.full(SIZE, factor, np.float32)) if overflow else Tensor(x * factor) for _ in range(3)]
        skipped = [bool(cell(*values)[1]) for cell in cells]
        expect_equal(skipped[1], skipped[0], "whether a step was skipped, with and without sharing")
    for weight, wanted in zip(networks[1].weights, networks[0].weights):
        expect(
            np.array_equal(weight.asnumpy(), wanted.asnumpy()),
            f"the ranks hold different weights with a shared state: {weight.asnumpy()}, and not {wanted.asnumpy()}",
        )
    state, part = (sum(moment.size for moment in optimizer.moments1) for optimizer in (plain, sharded.optimizer))
    expect_equal(part, -(-SIZE // get_group_size()) * state // SIZE, "the elements of a rank's part of a moment")
