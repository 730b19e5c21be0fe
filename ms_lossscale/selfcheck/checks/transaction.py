"""Whether a step is a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, differing, expect, expect_equal, values
from ms_lossscale.selfcheck.networks import FORWARD_OVERFLOWS, SIZE, Normalised, decaying_adam

# The last is the norm of the last gradients that were checked, for `grad_norm()`.
MAY_MOVE = ("loss_scale.", "step_counters.", "clipping.")


def _batch(seed, factor):
    x = np.random.default_rng(seed).normal(size=(8, SIZE)).astype(np.float32)
    return Tensor(x), Tensor([factor], mstype.float32)


def _moved(cell, *inputs):
    """The names of the Parameters that a step changes."""
    before = values(cell)
    cell(*inputs)
    return differing(values(cell), before)


@check(quick=True)
def a_skipped_step_leaves_every_parameter(device):
    """A skipped step changes no Parameter: weights, optimizer, learning rate, BatchNorm, averages. Others move all."""
    network = Normalised(device)
    cell = ScaledTrainOneStepCell(
        network, decaying_adam(network), DynamicLossScale(2.0**4), clip_norm=1.0, ema_decay=0.9
    ).set_train()
    cell(*_batch(0, 1.0))
    for seed in range(3):
        moved = [name for name in _moved(cell, *_batch(seed, FORWARD_OVERFLOWS)) if not name.startswith(MAY_MOVE)]
        expect_equal(cell.counters()["skipped_steps"], seed + 1, "the steps that were skipped")
        expect_equal(moved, [], "what a skipped step changed")
    moved = _moved(cell, *_batch(1, 1.0))
    for part in ("dense.weight", "norm.moving_mean", "adam_m.", "ema.", "calls", "step_counters.applied_steps"):
        expect(any(part in name for name in moved), f"a step without overflow left '{part}' as it was")
