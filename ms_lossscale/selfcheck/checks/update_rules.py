"""Whether loss scales follow their update rules, as computed elsewhere."""

from mindspore import Tensor

from ms_lossscale import DynamicLossScale, FixedLossScale, ScheduledLossScale
from ms_lossscale.selfcheck.claim import check, expect_equal

# What torch.amp.GradScaler 2.13 made of these overflows on CPU: its arguments, the overflows, the scale after each.
GROWS_AND_BACKS_OFF = (
    {
        "init_loss_scale": 64.0,
        "scale_factor": 2.0,
        "backoff_factor": 0.5,
        "scale_window": 3,
        "min_loss_scale": 2.0**-20,
    },
    [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1],
    [64, 32, 32, 16, 16, 16, 8, 8, 4, 4, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1],
)
BACKS_OFF_BY_A_QUARTER = (
    {"init_loss_scale": 4.0, "scale_factor": 2.0, "backoff_factor": 0.25, "scale_window": 2},
    [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    [4, 8, 8, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64, 128, 128, 32],
)
# By the written rule.
STOPS_AT_ITS_FLOOR = (
    {"init_loss_scale": 8.0, "scale_window": 2, "min_loss_scale": 1.0},
    [1, 1, 1, 1, 1, 0, 0, 0, 0],
    [4, 2, 1, 1, 1, 1, 2, 2, 4],
)
STOPS_AT_ITS_CEILING = (
    {"init_loss_scale": 2.0**23, "scale_window": 1, "max_loss_scale": 2.0**24},
    [0, 0, 0, 1, 0, 0],
    [2**24, 2**24, 2**24, 2**23, 2**24, 2**24],
)
WAITS_FOR_A_SECOND_OVERFLOW = (
    {"init_loss_scale": 256.0, "scale_window": 3, "hysteresis": 2},
    [1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0],
    [256, 256, 256, 128, 128, 128, 256, 256, 256, 256, 256, 256, 128, 128, 64, 64, 64, 128],
)


def _follow(loss_scale, overflows):
    scales = []
    for overflow in overflows:
        loss_scale.adjust(grads_finite=Tensor(not overflow))
        scales.append(loss_scale.get_loss_scale())
    return scales


@check()
def the_dynamic_law_is_that_of_others(device):
    """A DynamicLossScale grows and backs off as PyTorch's GradScaler does."""
    for settings, overflows, scales in (GROWS_AND_BACKS_OFF, BACKS_OFF_BY_A_QUARTER):
        expect_equal(_follow(DynamicLossScale(**settings), overflows), scales, f"the scales of {settings}")


@check()
def the_dynamic_law_keeps_its_bounds(device):
    """A DynamicLossScale stops at its floor and at its ceiling."""
    for settings, overflows, scales in (STOPS_AT_ITS_FLOOR, STOPS_AT_ITS_CEILING):
        expect_equal(_follow(DynamicLossScale(**settings), overflows), scales, f"the scales of {settings}")


@check()
def hysteresis_waits(device):
    """With hysteresis=2 a DynamicLossScale backs off at the second overflow in a row."""
    settings, overflows, scales = WAITS_FOR_A_SECOND_OVERFLOW
    expect_equal(_follow(DynamicLossScale(**settings), overflows), scales, f"the scales of {settings}")


@check()
def fixed_and_scheduled_scales_ignore_overflows(device):
    """A FixedLossScale stays, and a ScheduledLossScale changes at its milestones, whatever overflows."""
    overflows = [0, 1, 0, 1, 1, 0]
    expect_equal(_follow(FixedLossScale(128.0), overflows), [128.0] * 6, "the scales")
    scheduled = ScheduledLossScale([2, 5], [1024.0, 16.0])
    expect_equal(_follow(scheduled, overflows), [1024.0, 16.0, 16.0, 16.0, 16.0, 16.0], "the scales after each step")
