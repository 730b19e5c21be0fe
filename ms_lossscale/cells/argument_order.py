"""Arguments in a wrong order: the message says what was passed where, and which order is right."""

import numbers

from mindspore import experimental, nn

from ms_lossscale.loss_scale import LossScale
from ms_lossscale.sharding.sharded_optimizer import ShardedOptimizer

# What can only be one of these. Networks may be any Cells.
_KINDS = {
    "optimizer": (nn.Optimizer, experimental.optim.Optimizer, ShardedOptimizer),
    "loss_scale": (LossScale, numbers.Real),
}


def check_order(owner, **arguments):
    """Raises a TypeError if one of the first arguments of `owner`, in their order, surely belongs to another place."""
    for name, value in arguments.items():
        first = value[0] if isinstance(value, (list, tuple, nn.CellList)) and len(value) else value
        kinds = [kind for kind, classes in _KINDS.items() if isinstance(first, classes) and not isinstance(first, bool)]
        if kinds and not name.startswith(kinds[0]):
            place = next((its for its in arguments if its.startswith(kinds[0])), kinds[0])
            raise TypeError(
                f"For '{owner}', the argument '{name}' can't be a {type(first).__name__}, which belongs to '{place}'. "
                f"The order is {owner}({', '.join(arguments)}), where a network returns the loss."
            )
