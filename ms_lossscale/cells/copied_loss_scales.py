"""Copies one loss scale for each of several networks."""

import copy

from mindspore import Parameter, nn

from ms_lossscale.forward_state.referents import may_lead_on, referents
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.loss_scale import LossScale


def copied_loss_scales(owner, loss_scale, networks, others):
    """
    Returns a copy of `loss_scale` for each network. Raises if something else of the cell has Parameters or buffers of
    it, since that would go on with those of the original. `others` are all other parts of the cell, by what they are.
    """
    if isinstance(loss_scale, LossScale):
        if holds_input_gradient(networks, loss_scale):
            raise ValueError(
                f"For '{owner}', the argument 'loss_scale' is copied for each network, so an InputGradient that "
                f"holds it would follow none of the copies. Pass a list with a loss scale for each network, and "
                f"give the InputGradient the one of its own network."
            )
        _check_shares_nothing(owner, loss_scale, {**others, "a network": networks})
    return [copy.deepcopy(loss_scale) for _ in networks]


def _check_shares_nothing(owner, loss_scale, others):
    its = _state(_held_by([loss_scale], {}))
    seen = {}
    for what, things in others.items():
        shared = [name for key, name in _state(_held_by(things, seen)).items() if key in its]
        if shared:
            raise ValueError(
                f"For '{owner}', the argument 'loss_scale' is copied for each network, but {what} holds its "
                f"{shared[0]!r}, too, and would share it with none of the copies. Pass a list with a loss scale for "
                f"each network, and let each network share that of its own: loss_scale=[a, b], "
                f"gradient_transforms=[[a.measure], [b.measure]], say."
            )


def _state(things):
    """Returns the names of Parameters and buffers, by their ids."""
    state = {id(thing): thing.name for thing in things if isinstance(thing, Parameter)}
    for cell in things:
        if isinstance(cell, nn.Cell):
            state.update((id(each), name) for name, each in cell._buffers.items() if each is not None)
    return state


def _held_by(things, seen):
    """
    Returns what attributes, containers and closures lead to, apart from what was `seen` before. Unlike what forwards
    may write, this includes loss scales. It does not include what functions only name: a name may be another's, too.
    """
    found, waiting = [], list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and (may_lead_on(thing) or isinstance(thing, LossScale)):
            seen[id(thing)] = thing
            found.append(thing)
            waiting.extend(referents(thing))
    return found
