"""The Parameters and buffers that an overflow must not leave as the forward wrote them."""

import warnings

from mindspore import Parameter, Tensor

from ms_lossscale._check import listed
from ms_lossscale.forward_writes import find_forward_writes

# So many elements of what can't be decided are copied in each step, rather than asked about.
_FEW = 10**6
_SHOWN = 3


class SharedBuffer:
    """
    A registered buffer, and a Parameter that shares its memory: compiled code reads a buffer as the constant that it
    was, but not a Parameter.

    Args:
        name (str): For the Parameter.
        buffer (Tensor): The buffer.
        cell (Cell): Where it is registered, if that is known.
        attribute (str): And under which name.
    """

    def __init__(self, name, buffer, cell=None, attribute=""):
        self._buffer, self._cell, self._attribute = buffer, cell, attribute
        self.parameter = Parameter(Tensor(buffer.asnumpy()), name=name, requires_grad=False)
        self.share()

    def registered(self):
        """The buffer that is registered now."""
        return self._buffer if self._cell is None else getattr(self._cell, self._attribute)

    def share(self):
        """Before the first step: pretrained values may have come with memory of their own."""
        self.parameter.assign_value(self.registered())


def find_forward_state(owner, networks, declared=()):
    """
    What the forward of networks may write.

    Args:
        owner (str): Who asks, for a warning.
        networks (tuple[Cell]): The networks.
        declared (tuple[Parameter]): What the user says that it writes.

    Returns:
        Tuple of a list[Parameter], each once, and a list[SharedBuffer].
    """
    writes = find_forward_writes(networks)
    known = {id(parameter): parameter for parameter in (*writes.written, *declared)}
    undecided = [(parameter, why) for parameter, why in writes.undecided if id(parameter) not in known]
    elements = 0
    for parameter, _ in sorted(undecided, key=lambda pair: pair[0].size):
        elements += parameter.size
        if elements <= _FEW:
            known[id(parameter)] = parameter
    too_large = [(parameter, why) for parameter, why in undecided if id(parameter) not in known]
    if too_large:
        _warn(owner, too_large)
    return list(known.values()), _shared(networks, writes.buffers)


def _warn(owner, undecided):
    names = [parameter.name for parameter, _ in undecided]
    warnings.warn(
        f"For '{owner}', it can't be told whether the forward writes {listed(names, _SHOWN)}, since "
        f"{undecided[0][1]}; they are too large to be copied in each step in case. What it writes of them, a step that "
        f"overflows leaves behind: name it with forward_state=[...].",
        RuntimeWarning,
        stacklevel=2,
    )


def _shared(networks, buffers):
    places = {}
    for network in networks:
        for path, cell in network.cells_and_names():
            for attribute, buffer in cell.named_buffers(recurse=False):
                places.setdefault(id(buffer), (f"{path}.{attribute}" if path else attribute, cell, attribute))
    shared = []
    for i, buffer in enumerate(buffers):
        # One of a cell that is registered nowhere has no name.
        name, *place = places.get(id(buffer), ("unregistered",))
        shared.append(SharedBuffer(f"buffer_{i}.{name}", buffer, *place))
    return shared
