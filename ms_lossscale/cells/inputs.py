"""The inputs of a call: which of them each network takes, and whether it can."""

import numbers

from ms_lossscale._arguments import describe, listed
from ms_lossscale._warn_user import warn_user
from ms_lossscale.function_network import misfit, name_of
from ms_lossscale.step.forward_backward import inputs_of

# How many more inputs a network is tried with.
_MORE_INPUTS = 20
_DEPEND_ON_MODE = ("Dropout", "BatchNorm", "SyncBatchNorm")


def check_network_inputs(owner, network_inputs, networks):
    """Raises unless `network_inputs` is None or gives positions for each network. Returns it as a tuple of tuples."""
    if network_inputs is None:
        return None
    what = f"For '{owner}', the argument 'network_inputs' must be None or a list with a tuple of positions for each"
    if not isinstance(network_inputs, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in network_inputs):
        raise TypeError(f"{what} network, [(0, 1), (1,)] say, but got {describe(network_inputs)}.")
    if len(network_inputs) != len(networks):
        raise ValueError(f"{what} of the {len(networks)} networks, but got {len(network_inputs)}: {network_inputs!r}.")
    for position in (position for positions in network_inputs for position in positions):
        if not isinstance(position, numbers.Integral) or isinstance(position, bool):
            raise TypeError(f"{what} network, integers >= 0, but got {describe(position)}.")
        if position < 0:
            raise ValueError(f"{what} network, integers >= 0 counted from the first input, but got {position}.")
    return tuple(tuple(int(position) for position in positions) for positions in network_inputs)


def check_inputs(cell, inputs, keywords):
    """Raises for a number of inputs that a network surely can't take."""
    owner = type(cell).__name__
    networks = [network for step in cell._steps for network in step.networks_run.networks()]
    if not cell._fitting:
        warn_of_evaluation_mode(owner, networks)
    # The construct of a user's subclass may pass on others than it takes.
    if not type(cell).construct.__module__.startswith("ms_lossscale."):
        return
    if keywords:
        raise TypeError(f"For '{owner}', inputs are passed by position, but got {', '.join(keywords)} by keyword.")
    for i, network in enumerate(networks):
        count = len(inputs_of(owner, i, cell.network_inputs, inputs))
        taken = misfit(network, count)
        if taken is not None:
            raise TypeError(
                f"For '{owner}', network {i}, '{name_of(network)}', takes {taken}, but it gets {count} of "
                f"{len(inputs)} inputs. {_cure(network, inputs, count, taken)}"
                f"{' Or network_inputs=[(0, 1), (1,)] says which takes which.' if len(networks) > 1 else ''}"
            )


def _cure(network, inputs, count, taken):
    """Returns what to do about a network that can't take `count` of these inputs."""
    batch = inputs[0] if len(inputs) == 1 else None
    if isinstance(batch, (list, tuple, dict)) and misfit(network, len(batch)) is None:
        return f"Pass the items of a batch one by one, cell(*batch{'.values()' if isinstance(batch, dict) else ''})."
    if any(misfit(network, more) is None for more in range(count + 1, count + _MORE_INPUTS)):
        return f"Pass all that it takes, cell{taken}. Model needs Model(cell) without loss_fn."
    return (
        "Pass a network that takes all of them and returns the loss: nn.WithLossCell(network, loss_fn), where the "
        "network takes one input, else a Cell or function of your own."
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
            f"normalisation neither uses the batch's statistics nor moves its own: {listed(concerned, 5)}. "
            f"Call cell.set_train() before the first step. If it is on purpose, call cell.set_train(), and then "
            f"set_train(False) of these cells.",
            UserWarning,
        )
