"""A loss scale for each of several networks that are updated together."""

from ms_lossscale._arguments import one_each
from ms_lossscale.loss_scale import as_loss_scale, check_distinct
from ms_lossscale.step.optimizers import add_prefix, network_prefix


def loss_scale_of_each(owner, loss_scale, count):
    """Returns the LossScale that all of `count` networks share, or a list of theirs if `loss_scale` is a list."""
    if isinstance(loss_scale, (list, tuple)):
        return own_loss_scales(owner, one_each(owner, "loss_scale", loss_scale, count))
    return as_loss_scale(owner, loss_scale)


def own_loss_scales(owner, loss_scales):
    """Returns the LossScale of each network, with a prefix of its own before the names of its Parameters."""
    check_distinct(owner, loss_scales, "Construct one for each.")
    loss_scales = [as_loss_scale(owner, each) for each in loss_scales]
    drops = [each.drop_overflow_update for each in loss_scales]
    if len(set(drops)) > 1:
        raise ValueError(
            f"For '{owner}', the argument 'loss_scale' must hold loss scales with the same 'drop_overflow_update', "
            f"since the networks are updated together or not at all, but got {drops}. None checks nothing and so drops "
            f"nothing."
        )
    for i, each in enumerate(loss_scales):
        add_prefix(network_prefix(i), each.get_parameters())
    return loss_scales
