"""Whether a step that overflowed runs again at a lower scale."""

from mindspore import nn

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, expect, expect_equal
from ms_lossscale.selfcheck.networks import BACKWARD_OVERFLOWS, LOSS_SCALE, Products, inputs


def _cell(device):
    network = Products(device)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-5)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(LOSS_SCALE), max_retries=8).set_train()


@check()
def a_retry_saves_the_batch(device):
    """A batch whose gradients overflow is tried again at half the scale until it does not, within the same call."""
    cell = _cell(device)
    # 100 * 2**9 is the first that float16 holds.
    _, overflow, scale = cell(*inputs(1.0, BACKWARD_OVERFLOWS, 1.0))
    expect(not bool(overflow), "the step was skipped, though it does not overflow at a scale of 512")
    expect_equal(float(scale), 512.0, "the scale that the step used at last")
    expect_equal(cell.counters()["retries"], 3, "the tries beyond the first")


@check()
def what_no_scale_can_mend_is_skipped(device):
    """Where the loss itself is not finite no lower scale helps: the step is skipped, and the scale moves once."""
    cell = _cell(device)
    expect(bool(cell(*inputs(float("inf"), 1.0, 1.0))[1]), "a step with an infinite input was applied")
    expect_equal(cell.counters()["skipped_steps"], 1, "the steps that were skipped")
    if device.gradients_tell:
        expect_equal(cell.counters()["retries"], 0, "the tries, where the loss is not finite")
    expect_equal(cell.get_loss_scale(), LOSS_SCALE / 2, "the scale after one skipped step")
