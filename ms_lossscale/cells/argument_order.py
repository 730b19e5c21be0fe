"""Arguments in a wrong order: the message says what was passed where, and which order is right."""

import numbers

from mindspore import amp, experimental, nn

from ms_lossscale.loss_scale import LossScale
from ms_lossscale.sharding.sharded_optimizer import ShardedOptimizer

# What can only be one of these. Networks and loss functions may be any Cells.
_KINDS = {
    "an optimizer": (nn.Optimizer, experimental.optim.Optimizer, ShardedOptimizer),
    "a loss scale": (
        LossScale,
        numbers.Real,
        amp.FixedLossScaleManager,
        amp.DynamicLossScaleManager,
        nn.FixedLossScaleUpdateCell,
        nn.DynamicLossScaleUpdateCell,
    ),
    "a loss function": (nn.LossBase,),
}
_BELONGS = {"optimizer": "an optimizer", "loss_scale": "a loss scale", "loss_fn": "a loss function"}


def check_order(owner, **arguments):
    """Raises a TypeError if one of the first arguments of `owner`, in their order, surely belongs to another place."""
    for name, value in arguments.items():
        kind = _kind_of(value)
        right = _BELONGS.get(name.replace("optimizers", "optimizer"))
        if kind is None or kind == right or (name.startswith("network") and kind == "a loss function"):
            continue
        passed = ", ".join(f"'{name}' is {_shown(its)}" for name, its in arguments.items() if its is not None)
        of_network = " The network of a training cell computes the loss: nn.WithLossCell(network, loss_fn)."
        raise TypeError(
            f"For '{owner}', the argument '{name}' can't be {kind}, but {passed}. The order is "
            f"{owner}({', '.join(arguments)}).{of_network if kind == 'a loss function' else ''}"
        )


def _kind_of(value):
    values = list(value) if isinstance(value, (list, tuple, nn.CellList)) else [value]
    kinds = {_kind_of_one(each) for each in values}
    return kinds.pop() if len(kinds) == 1 else None


def _kind_of_one(value):
    if isinstance(value, bool):
        return None
    return next((kind for kind, classes in _KINDS.items() if isinstance(value, classes)), None)


def _shown(value):
    if isinstance(value, (list, tuple, nn.CellList)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value) if isinstance(value, (str, numbers.Real)) else f"of class {type(value).__name__}"
