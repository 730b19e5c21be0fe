"""Whether loss scales follow their update rules, as computed elsewhere."""

from mindspore import Tensor

from ms_lossscale import DynamicLossScale, FixedLossScale, ScheduledLossScale
from ms_lossscale.selfcheck.claim import check, expect_equal

# The arguments of a DynamicLossScale, overflows, and the scale after each of them. What torch.amp.GradScaler 2.13 made
# of these overflows on CPU:
_AS_OTHERS = (
    {"init_loss_scale": 64.0, "scale_window": 3, "min_loss_scale": 2.0**-20},
    [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1],
    [64, 32, 32, 16, 16, 16, 8, 8, 4, 4, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1],
)
# By the written rule:
_BOUNDED = ({"init_loss_scale": 2.0, "scale_window": 1, "max_loss_scale": 4.0}, [1, 1, 0, 0, 0, 1], [1, 1, 2, 4, 4, 2])
_HYSTERESIS = (
    {"init_loss_scale": 8.0, "scale_window": 2, "hysteresis": 2},
    [1, 0, 1, 1, 0, 0, 1],
    [8, 8, 8, 4, 4, 8, 8],
)


def _follow(loss_scale, overflows):
    scales = []
    for overflow in overflows:
        loss_scale.adjust(grads_finite=Tensor(not overflow))
        scales.append(loss_scale.get_loss_scale())
    return scales


def _expect_to_follow(settings, overflows, scales):
    expect_equal(_follow(DynamicLossScale(**settings), overflows), scales, f"the scales of {settings}")


@check(quick=True)
def a_dynamic_scale_moves_as_that_of_others(device):
    """A DynamicLossScale grows and backs off as PyTorch's GradScaler does."""
    _expect_to_follow(*_AS_OTHERS)


@check()
def a_dynamic_scale_keeps_its_bounds(device):
    """A DynamicLossScale stops at its floor and at its ceiling."""
    _expect_to_follow(*_BOUNDED)


@check()
def hysteresis_waits(device):
    """With hysteresis=2 a DynamicLossScale backs off at the second overflow in a row."""
    _expect_to_follow(*_HYSTERESIS)


@check()
def fixed_and_scheduled_scales_ignore_overflows(device):
    """A FixedLossScale stays, and a ScheduledLossScale changes at its milestones, whatever overflows."""
    overflows = [0, 1, 0, 1, 1, 0]
    expect_equal(_follow(FixedLossScale(128.0), overflows), [128.0] * 6, "the scales")
    scheduled = ScheduledLossScale([2, 5], [1024.0, 16.0])
    expect_equal(_follow(scheduled, overflows), [1024.0, 16.0, 16.0, 16.0, 16.0, 16.0], "the scales after each step")
