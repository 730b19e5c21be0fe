"""Refuses what can't be split over ranks: optimizers that use whole weights, and what is not a list of weights."""

import re
from collections.abc import Iterable

from mindspore import Parameter, Tensor

from ms_lossscale._arguments import check_cell, describe, listed

# Optimizers of MindSpore and its toolkits that use norms, means or factors of a whole weight, or all ranks' gradients.
_WHOLE = re.compile("_?(lamb(?!da)|lars|thor|adafactor|adasum|came|novograd|muon|shampoo)", re.IGNORECASE)
_SHOWN = 5
_CURE = "Pass network.trainable_params(), or a list of dicts with 'params', all of one form."


def as_list(owner, parameters):
    """Returns `parameters` as a list. Raises a TypeError if it is not one, but a single Parameter, for example."""
    if isinstance(parameters, (Tensor, str, dict)) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"For '{owner}', the argument 'parameters' must be a list of Parameters or of groups of them, but got "
            f"{describe(parameters)}. {_CURE}"
        )
    return list(parameters)


def check_groups(owner, parameters):
    """Raises unless these are Parameters, or groups of them that can be split. Returns the Parameters."""
    if not all(isinstance(each, dict) for each in parameters):
        return _checked(owner, parameters, "'parameters'")
    weights = []
    for group in parameters:
        if group.get("grad_centralization"):
            raise ValueError(
                f"For '{owner}', no group may have grad_centralization=True, which takes the mean over a whole weight, "
                f"of which each rank updates a part. Leave it out."
            )
        if "params" in group:
            its = group["params"]
            weights += _checked(owner, [its] if isinstance(its, Parameter) else its, "'params' of a group")
    if not weights:
        raise ValueError(
            f"For '{owner}', the argument 'parameters' must not be empty, but holds no Parameters: "
            f"{describe(parameters)}. {_CURE}"
        )
    return weights


def _checked(owner, parameters, what):
    # They are iterated over more than once.
    if not isinstance(parameters, (list, tuple)):
        raise TypeError(f"For '{owner}', {what} must be a list of Parameters, but got {describe(parameters)}. {_CURE}")
    for each in parameters:
        if not isinstance(each, Parameter):
            raise TypeError(f"For '{owner}', {what} must hold Parameters, but got {describe(each)}. {_CURE}")
    return list(parameters)


def check_needs_no_whole_weight(owner, optimizer, shards):
    """Raises unless the optimizer works element by element, judging by its class, and updates the shards."""
    check_cell(owner, "optimizer", optimizer, "The function must return an optimizer: lambda shards: nn.Adam(shards).")
    for _, cell in optimizer.cells_and_names():
        names = [each.__name__ for each in type(cell).__mro__] if hasattr(cell, "parameters") else []
        for name in names:
            if _WHOLE.match(name):
                raise ValueError(
                    f"For '{owner}', the argument 'optimizer' must return one that updates each element of a weight by "
                    f"itself, but {name} looks at whole weights, of which each rank has a part only. Take another "
                    f"optimizer, nn.AdamWeightDecay say, or {name} without {owner}."
                )
    has = {id(parameter): parameter for parameter in getattr(optimizer, "parameters", ())}
    wanted = {id(shard): shard for shard in shards}
    if has.keys() != wanted.keys():
        names = [each.name for key, each in (*wanted.items(), *has.items()) if (key in has) != (key in wanted)]
        raise ValueError(
            f"For '{owner}', the optimizer must update exactly the shards that its function gets, but the "
            f"{type(optimizer).__name__} leaves out or adds: {listed(names, _SHOWN)}. Pass it everything that the "
            f"function gets: lambda shards: {type(optimizer).__name__}(shards, ...)."
        )
