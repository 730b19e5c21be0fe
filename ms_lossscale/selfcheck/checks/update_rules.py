"""Whether loss scales follow their update rules, as computed elsewhere."""

from mindspore import Tensor

from ms_lossscale import DynamicLossScale, FixedLossScale, ScheduledLossScale
from ms_lossscale.selfcheck.claim import check, expect_equal


def _expect_scales(loss_scale, overflows, expected):
    scales = []
    for overflow in overflows:
        loss_scale.adjust(grads_finite=Tensor(not overflow))
        scales.append(loss_scale.get_loss_scale())
    expect_equal(scales, expected, f"the scales of a {type(loss_scale).__name__} after each step")


@check(quick=True)
def a_dynamic_scale_moves_as_that_of_others(device):
    """A DynamicLossScale grows and backs off as PyTorch's GradScaler does."""
    overflows = [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    # What torch.amp.GradScaler 2.13 made of them on CPU.
    expected = [64, 32, 32, 16, 16, 16, 8, 8, 4, 4, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1]
    _expect_scales(DynamicLossScale(64.0, scale_window=3, min_loss_scale=2.0**-20), overflows, expected)


@check()
def a_dynamic_scale_keeps_its_bounds(device):
    """A DynamicLossScale stops at its floor and at its ceiling."""
    loss_scale = DynamicLossScale(2.0, scale_window=1, max_loss_scale=4.0)
    _expect_scales(loss_scale, [1, 1, 0, 0, 0, 1], [1, 1, 2, 4, 4, 2])


@check()
def hysteresis_waits(device):
    """With hysteresis=2 a DynamicLossScale backs off at the second overflow in a row."""
    loss_scale = DynamicLossScale(8.0, scale_window=2, hysteresis=2)
    _expect_scales(loss_scale, [1, 0, 1, 1, 0, 0, 1], [8, 8, 8, 4, 4, 8, 8])


@check()
def fixed_and_scheduled_scales_ignore_overflows(device):
    """A FixedLossScale stays, and a ScheduledLossScale changes at its milestones, whatever overflows."""
    overflows = [0, 1, 0, 1, 1, 0]
    _expect_scales(FixedLossScale(128.0), overflows, [128.0] * 6)
    _expect_scales(ScheduledLossScale([2, 5], [1024.0, 16.0]), overflows, [1024.0] + [16.0] * 5)
