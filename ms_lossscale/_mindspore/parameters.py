"""Parameters: writing them in place, the gradients that they hold, and those that no list has."""

from collections.abc import Iterable
from typing import Optional

from mindspore import Parameter, Tensor, experimental, nn, ops

from ms_lossscale._mindspore.pynative import forget_failed_calls


def write_in_place(values: list[tuple[Parameter, Tensor]]) -> None:
    """
    Writes into the present memory of Parameters, which compiled code uses. Call it in PyNative mode or between steps.

    Args:
        values (list[tuple[Parameter, Tensor]]): Pairs of a Parameter and a tensor of its shape, which is cast.
    """
    if values:
        forget_failed_calls()
    for parameter, value in values:
        value = ops.cast(value, parameter.dtype)
        try:
            ops.assign(parameter, value)
        except RuntimeError:
            # A view is refused; `parameter.set_data(value.reshape(...))` makes the Parameter one.
            parameter.copy_(value)


def take_held_gradients(weights: Iterable[Parameter]) -> list[Optional[Tensor]]:
    """
    Takes from weights the gradients that a `.backward()` has left in them. Returns None for a weight without.

    They are in `.grad` from the MindSpore on that has a public `Tensor.backward`; until 2.10, its machinery keeps them
    in `._grad`.
    """
    grads = []
    for weight in weights:
        name = "grad" if hasattr(weight, "grad") else "_grad"
        grad = getattr(weight, name, None)
        if grad is not None:
            setattr(weight, name, None)
        grads.append(grad)
    return grads


def unlisted_state(optimizer: nn.Cell) -> list[Parameter]:
    """
    Returns the Parameters that get_parameters(), and so a checkpoint, misses because MindSpore's experimental
    optimizers keep them in plain lists: learning rates, and `mu_product` of NAdam.
    """
    # Other optimizers have lists, too, but with a learning rate that has been replaced.
    if not isinstance(optimizer, experimental.optim.Optimizer):
        return []
    listed = {id(parameter) for parameter in optimizer.get_parameters()}
    found = {}
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            found.update({id(p): p for p in value if isinstance(p, Parameter) and id(p) not in listed})
    return list(found.values())
