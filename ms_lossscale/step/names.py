"""The names of Parameters in a checkpoint: each is there once, whatever a cell has several of."""

import itertools

from ms_lossscale._arguments import must_be
from ms_lossscale._mindspore.parameters import unlisted_state
from ms_lossscale.loss_scale import as_loss_scale, check_distinct
from ms_lossscale.sharding.load_parts import LAYOUT
from ms_lossscale.sharding.sharded_optimizer import ShardedOptimizer
from ms_lossscale.step.forward_state import state_of
from ms_lossscale.step.optimizers import masters_of, updating


def network_prefix(i):
    """Returns the prefix for the names of Parameters that each of several networks has."""
    return f"network_{i}."


def name_prefix(owner, name):
    """Returns what a cell with this name puts before the names of its state. Raises unless it can be a name."""
    if name is None:
        return ""
    if not isinstance(name, str) or not name:
        raise TypeError(must_be(owner, "name", "a str that is not empty", name))
    return f"{name}."


def add_prefix(prefix, parameters):
    """Puts the prefix before the parameters' names, once."""
    for parameter in parameters:
        if not parameter.name.startswith(prefix):
            parameter.name = prefix + parameter.name


def own_loss_scale(owner, loss_scale, prefix):
    """Returns the LossScale that all networks share. Its names get a prefix."""
    shared = as_loss_scale(owner, loss_scale)
    _prefix_once(prefix, shared)
    return shared


def own_loss_scales(owner, loss_scale, count, prefix):
    """Returns a list: the LossScale that all networks share, or, if it is a list, theirs. Their names get prefixes."""
    if not isinstance(loss_scale, (list, tuple)):
        return [own_loss_scale(owner, loss_scale, prefix)]
    if len(loss_scale) != count:
        raise ValueError(
            f"For '{owner}', the argument 'loss_scale', if it is a list, must have one entry for each of the {count} "
            f"networks, but got {len(loss_scale)}."
        )
    check_distinct(owner, loss_scale, "Construct one for each.")
    loss_scales = [as_loss_scale(owner, each) for each in loss_scale]
    for i, own_scale in enumerate(loss_scales):
        if prefix:
            _prefix_once(f"{prefix}{network_prefix(i)}", own_scale)
        else:
            add_prefix(network_prefix(i), own_scale.get_parameters())
    return loss_scales


def _prefix_once(prefix, loss_scale):
    # Another step may share it, and have given it a prefix.
    if loss_scale.scale_value.name.startswith("loss_scale."):
        add_prefix(prefix, loss_scale.get_parameters())


def name_states(networks, optimizers, settings, prefix=""):
    """
    Makes the names of the state of optimizers, transforms and conditions unique; all begin with `prefix`. There are
    settings for each step.
    """
    transforms = [transforms for of_step in settings for transforms in of_step.gradient_transforms]
    conditions = [of_step.skip_conditions for of_step in settings]
    _prefix_states_of_optimizers(optimizers, prefix)
    _prefix_states(transforms, networks, "transform", prefix)
    _prefix_states(conditions, networks, "condition", prefix)


def _prefix_states_of_optimizers(optimizers, prefix):
    """Makes the names of several optimizers' states unique: MindSpore gives all the same ones. `prefix` comes first."""
    masters = [master for _, master in masters_of(optimizers)]
    # One optimizer may be that of several networks.
    for optimizer in dict.fromkeys(optimizers):
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.follow_names()
        numbers = [i for i, other in enumerate(optimizers) if other is optimizer]
        # Masters are named after their weights.
        weights = {id(weight) for weight in (*optimizer.parameters, *masters)}
        parameters = (*optimizer.get_parameters(), *unlisted_state(optimizer))
        of_optimizer = "".join(f"{prefix}optimizer_{i}." for i in reversed(numbers)) if len(optimizers) > 1 else prefix
        add_prefix(of_optimizer, (state for state in parameters if id(state) not in weights))


def _prefix_states(lists, networks, what, prefix):
    """
    Makes the names of the state of transforms, or of conditions, unique, given those of each network. A prefix goes to
    one with a name that an earlier one in its list has, and to one that only one of several networks has. `prefix` goes
    to all of them.
    """
    for i, transforms in enumerate(lists):
        taken = {}
        for j, transform in enumerate(transforms):
            parameters = state_of([transform], networks)
            if any(taken.setdefault(parameter.name, parameter) is not parameter for parameter in parameters):
                add_prefix(f"{what}_{j}.", parameters)
        of_others = set(itertools.chain(*lists[:i], *lists[i + 1 :]))
        if len(lists) > 1:
            alone = [transform for transform in transforms if transform not in of_others]
            add_prefix(network_prefix(i), state_of(alone, networks))
        add_prefix(prefix, state_of(transforms, networks))


def names_of_states(optimizer):
    """Returns, by their ids, the names that states have in a held cell of MindSpore's, without its prefix."""
    if getattr(optimizer, "is_split", False):
        # Without the cell's own name, which no state of MindSpore's has in a holder.
        own = len(optimizer.layout.name) - len(LAYOUT)
        return {id(state): f"optimizer.{state.name[own:]}" for state in optimizer.get_parameters()}
    masters = {id(master) for _, master in masters_of([optimizer])}
    named = updating(optimizer).parameters_and_names("optimizer")
    return {id(state): name for name, state in named if id(state) not in masters}
