"""Looks, before the first call, at the number of inputs that each network gets, and at the networks' modes."""

from ms_lossscale._arguments import listed
from ms_lossscale._signatures import misfit
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.function_network import name_of
from ms_lossscale.step.step import inputs_of

_MOST_NAMES = 5
_DEPEND_ON_MODE = ("Dropout", "BatchNorm", "SyncBatchNorm")


def check_inputs(cell, inputs, keywords):
    """Raises for a number of inputs that a network surely can't take."""
    owner = type(cell).__name__
    parts = [part for step in cell.steps for part in step.forwards_and_backwards.forward_backwards]
    if not cell._fitting:
        warn_of_evaluation_mode(owner, [part.network for part in parts])
    # The construct of a user's subclass may pass on others than it takes.
    if not type(cell).construct.__module__.startswith("ms_lossscale."):
        return
    if keywords:
        raise TypeError(f"For '{owner}', inputs are passed by position, but got {', '.join(keywords)} by keyword.")
    for i, part in enumerate(parts):
        count = len(inputs_of(owner, i, cell.network_inputs, inputs))
        taken = misfit(part.network, count)
        if taken is not None:
            raise TypeError(
                f"For '{owner}', network {i}, '{name_of(part.network)}', takes {taken}, but it gets {count} of "
                f"{len(inputs)} inputs. The network must return the loss: nn.WithLossCell(network, loss_fn), say. With "
                f"several networks, network_inputs=[(0, 1), (1,)] says which takes which; Model needs Model(cell) "
                f"without loss_fn."
            )


def warn_of_evaluation_mode(owner, networks):
    """
    Warns if no cell of the networks is in training mode, and some of MindSpore's compute something else there. Where
    one is in training mode, the user or Model has called `set_train()`, and chose the others' modes.
    """
    named = {id(cell): (name, cell) for network in networks for name, cell in network.cells_and_names()}.values()
    kinds = [(name or "the network", type(cell).__name__) for name, cell in named]
    concerned = [f"{name} ({kind})" for name, kind in kinds if kind.startswith(_DEPEND_ON_MODE)]
    if concerned and not any(cell.training for _, cell in named):
        warn_user(
            f"For '{owner}', all cells of the network are in evaluation mode, in which dropout drops nothing, and a "
            f"normalisation neither uses the batch's statistics nor moves its own: {listed(concerned, _MOST_NAMES)}. "
            f"Call cell.set_train() before the first step. If it is on purpose, call cell.set_train(), and then "
            f"set_train(False) of these cells.",
            UserWarning,
        )
