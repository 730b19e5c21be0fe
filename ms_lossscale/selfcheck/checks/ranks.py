"""Whether ranks decide together: only under `msrun`."""

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_group_size, get_rank

from ms_lossscale.selfcheck.claim import check, expect, expect_equal
from ms_lossscale.selfcheck.networks import BACKWARD_OVERFLOWS, cell_of_products, inputs


def _cell(device):
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    try:
        return cell_of_products(device)
    finally:
        mindspore.reset_auto_parallel_context()


@check("has_ranks", quick=True)
def an_overflow_on_one_rank_skips_the_step_on_all(device):
    """Whichever rank overflows, all ranks skip the step, and afterwards hold the same weights and loss scale."""
    cell = _cell(device)
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
