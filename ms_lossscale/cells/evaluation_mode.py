"""Notices a training whose networks are all in evaluation mode, since nobody has called `set_train()`."""

from ms_lossscale._arguments import listed
from ms_lossscale._user_warnings import warn_user

_MOST_NAMES = 5


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
