"""The Parameters and buffers that an overflow must not leave as the forward wrote them."""

import warnings

from mindspore import Parameter, Tensor

from ms_lossscale.forward_writes import find_forward_writes

# So many elements of what can't be decided are copied in each step, rather than asked about.
_FEW = 10**6
_SHOWN = 3


def find_forward_state(owner, networks, declared=()):
    """
    What the forward of networks may write.

    Args:
        owner (str): Who asks, for a warning.
        networks (tuple[Cell]): The networks.
        declared (tuple[Parameter]): What the user says that it writes.

    Returns:
        list[Parameter], each once; for each registered buffer one that shares its memory.
    """
    writes = find_forward_writes(networks)
    known = {id(parameter): parameter for parameter in (*writes.written, *declared)}
    undecided = [(parameter, why) for parameter, why in writes.undecided if id(parameter) not in known]
    if sum(parameter.size for parameter, _ in undecided) > _FEW:
        _warn(owner, undecided)
    else:
        known.update((id(parameter), parameter) for parameter, _ in undecided)
    return [*known.values(), *_sharing_memory(networks, writes.buffers)]


def _warn(owner, undecided):
    names = [parameter.name for parameter, _ in undecided]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    warnings.warn(
        f"For '{owner}', it can't be told whether the forward writes {', '.join(names[:_SHOWN])}{more}, since "
        f"{undecided[0][1]}; they are too large to be copied in each step in case. What it writes of them, a step that "
        f"overflows leaves behind: name it with forward_state=[...].",
        RuntimeWarning,
        stacklevel=2,
    )


def _sharing_memory(networks, buffers):
    """Compiled code reads a buffer as the constant that it was, but not a Parameter."""
    names = {id(buffer): name for network in networks for name, buffer in network.named_buffers()}
    sharing = []
    for i, buffer in enumerate(buffers):
        parameter = Parameter(Tensor(buffer.asnumpy()), name=f"buffer_{i}.{names[id(buffer)]}", requires_grad=False)
        parameter.assign_value(buffer)
        sharing.append(parameter)
    return sharing
