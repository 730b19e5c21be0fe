"""Looks, before the first call, at the number of inputs that each network gets, and at the networks' modes."""

from ms_lossscale._arguments import listed
from ms_lossscale._signatures import misfit
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.function_network import name_of
from ms_lossscale.step.step import inputs_of

_MOST_NAMES = 5


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
    Warns if no cell of the networks is in training mode, and some of MindSpore's would compute something else there.
    Where one is in training mode, the user or Model has called `set_train()`, and chose the others' modes.
    """
    named = {id(cell): (name, cell) for network in networks for name, cell in network.cells_and_names()}.values()
    if any(cell.training for _, cell in named):
        return
    concerned = [f"{name or 'the network'} ({type(cell).__name__})" for name, cell in named if _depends_on_mode(cell)]
    if concerned:
        warn_user(
            f"For '{owner}', all cells of the network are in evaluation mode, in which dropout drops nothing, and a "
            f"normalisation neither uses the batch's statistics nor moves its own: {listed(concerned, _MOST_NAMES)}. "
            f"Call cell.set_train() before the first step. If it is on purpose, call cell.set_train(), and then "
            f"set_train(False) of these cells.",
            UserWarning,
        )


def _depends_on_mode(cell):
    """Returns whether one of MindSpore's cells computes something else in training mode than in evaluation mode."""
    names = [each.__name__ for each in type(cell).__mro__ if each.__module__.partition(".")[0] == "mindspore"]
    if any(name.startswith("Dropout") for name in names):
        return getattr(cell, "keep_prob", None) != 1 and 0 not in (
            getattr(cell, "p", None),
            getattr(cell, "prob", None),
        )
    if not any(name.startswith(("_BatchNorm", "BatchNorm")) for name in names):
        return False
    follows = getattr(cell, "use_batch_statistics", None) is None and getattr(cell, "track_running_stats", True)
    # A frozen one stays in evaluation mode on purpose.
    return follows and any(parameter.requires_grad for parameter in cell.get_parameters())
