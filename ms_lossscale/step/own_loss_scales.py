"""A loss scale for each of several networks that are updated together."""

from ms_lossscale.loss_scale import as_loss_scale, check_distinct
from ms_lossscale.step.optimizers import add_prefix, network_prefix


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
