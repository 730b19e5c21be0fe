"""Whether a step is a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, differing, expect, expect_equal, values
from ms_lossscale.selfcheck.networks import (
    BACKWARD_OVERFLOWS,
    FORWARD_OVERFLOWS,
    LOSS_SCALE,
    SIZE,
    Normalised,
    cell_of_products,
    decaying_adam,
    inputs,
)

# The last is the norm of the last gradients that were checked, for `grad_norm()`.
MAY_MOVE = ("loss_scale.", "step_counters.", "clipping.")


def _cell(device):
    network = Normalised(device)
    keywords = {"clip_norm": 1.0, "ema_decay": 0.9}
    return ScaledTrainOneStepCell(network, decaying_adam(network), DynamicLossScale(2.0**4), **keywords).set_train()


def _batch(seed, factor):
    x = np.random.default_rng(seed).normal(size=(8, SIZE)).astype(np.float32)
    return Tensor(x), Tensor([factor], mstype.float32)


def _moved(cell, *inputs):
    """The names of the Parameters that a step changes."""
    before = values(cell)
    cell(*inputs)
    return differing(values(cell), before)


@check()
def a_skipped_step_leaves_every_parameter(device):
    """A skipped step changes no Parameter in one bit: weights, optimizer, learning rate, BatchNorm, averages."""
    cell = _cell(device)
    for seed in range(3):
        cell(*_batch(seed, 1.0))
    for seed in range(3):
        moved = [name for name in _moved(cell, *_batch(seed, FORWARD_OVERFLOWS)) if not name.startswith(MAY_MOVE)]
        expect_equal(cell.counters()["skipped_steps"], seed + 1, "the steps that were skipped")
        expect_equal(moved, [], "what a skipped step changed")


@check()
def an_applied_step_moves_them(device):
    """A step without overflow moves the weights, the optimizer, BatchNorm's statistics and the averages."""
    cell = _cell(device)
    cell(*_batch(0, 1.0))
    moved = _moved(cell, *_batch(1, 1.0))
    for part in ("dense.weight", "norm.moving_mean", "adam_m.", "ema.", "calls", "step_counters.applied_steps"):
        expect(any(part in name for name in moved), f"a step without overflow left '{part}' as it was")


@check()
def a_retry_saves_the_batch(device):
    """A batch whose gradients overflow is tried again at half the scale until it does not, within the same call."""
    cell = cell_of_products(device, max_retries=8)
    # 100 * 2**9 is the first that float16 holds.
    _, overflow, scale = cell(*inputs(1.0, BACKWARD_OVERFLOWS, 1.0))
    expect(not bool(overflow), "the step was skipped, though it does not overflow at a scale of 512")
    expect_equal(float(scale), 512.0, "the scale that the step used at last")
    expect_equal(cell.counters()["retries"], 3, "the attempts beyond the first")


@check()
def what_no_scale_can_mend_is_skipped(device):
    """Where the loss itself is not finite no lower scale helps: the step is skipped, and the scale moves once."""
    cell = cell_of_products(device, max_retries=8)
    expect(bool(cell(*inputs(float("inf"), 1.0, 1.0))[1]), "a step with an infinite input was applied")
    expect_equal(cell.counters()["skipped_steps"], 1, "the steps that were skipped")
    if device.gradients_show_it:
        expect_equal(cell.counters()["retries"], 0, "the further attempts, where the loss is not finite")
    expect_equal(cell.get_loss_scale(), LOSS_SCALE / 2, "the scale after one skipped step")
