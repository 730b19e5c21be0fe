"""The types that may be passed as a loss scale."""

import numbers
from typing import Any, Union

from mindspore import amp, nn

from ms_lossscale._arguments import describe
from ms_lossscale.loss_scale.base import LossScale
from ms_lossscale.loss_scale.update_rules import DynamicLossScale, FixedLossScale

AcceptedLossScale = Union[
    float,
    LossScale,
    amp.FixedLossScaleManager,
    amp.DynamicLossScaleManager,
    nn.FixedLossScaleUpdateCell,
    nn.DynamicLossScaleUpdateCell,
    None,
]


def as_loss_scale(owner: str, loss_scale: Any) -> LossScale:
    """
    Returns the LossScale that `loss_scale` stands for. MindSpore's managers and update cells are replaced by loss
    scales with the same settings; None means no scaling and no check. Raises for anything else, naming `owner`.
    """
    if loss_scale is None:
        return FixedLossScale(1.0, drop_overflow_update=False)
    if isinstance(loss_scale, LossScale):
        _check_has_rule(owner, loss_scale)
        return loss_scale
    if isinstance(loss_scale, numbers.Real) and not isinstance(loss_scale, bool):
        return FixedLossScale(float(loss_scale))
    if isinstance(loss_scale, amp.FixedLossScaleManager):
        return FixedLossScale(loss_scale.get_loss_scale(), loss_scale.get_drop_overflow_update())
    if isinstance(loss_scale, nn.FixedLossScaleUpdateCell):
        return FixedLossScale(loss_scale.get_loss_scale())
    if isinstance(loss_scale, (amp.DynamicLossScaleManager, nn.DynamicLossScaleUpdateCell)):
        return _dynamic(loss_scale)
    raise TypeError(
        f"For '{owner}', the argument 'loss_scale' must be a loss scale of ms_lossscale, a number, None, or one of "
        f"MindSpore's FixedLossScaleManager, DynamicLossScaleManager, FixedLossScaleUpdateCell and "
        f"DynamicLossScaleUpdateCell, but got {describe(loss_scale)}."
    )


def check_distinct(owner, loss_scales, cure):
    """Raises a ValueError if two networks, each with its own loss scale, were given the same Cell."""
    cells = [id(each) for each in loss_scales if isinstance(each, nn.Cell)]
    if len(set(cells)) < len(cells):
        raise ValueError(
            f"For '{owner}', the argument 'loss_scale' must not hold the same Cell twice, since each network has its "
            f"own. {cure}"
        )


def _check_has_rule(owner, loss_scale):
    its_class = type(loss_scale)
    if its_class.next_scale is LossScale.next_scale:
        raise TypeError(
            f"For '{owner}', the argument 'loss_scale' must have an update rule, but '{its_class.__name__}' does not "
            f"define 'next_scale(self, loss_scale, overflow)'. It gets the scale of a step and whether the step "
            f"overflowed, and returns the next step's scale, a float32 Tensor. Use FixedLossScale for a constant scale."
        )


def _dynamic(stock):
    init = float(stock.get_loss_scale())
    # MindSpore's have no ceiling. Ours must not be below the scale that the user asked for.
    ceiling = max(init, 2.0**24)
    return DynamicLossScale(init, float(stock.scale_factor), int(stock.scale_window), max_loss_scale=ceiling)
