"""Finds the Parameters and buffers that a skipped step must restore."""

import warnings
from collections import Counter
from dataclasses import dataclass, field

from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale._arguments import listed
from ms_lossscale.forward_state.entries import entries
from ms_lossscale.forward_state.ownership import forget_imports, is_users
from ms_lossscale.forward_state.reachable import Reach
from ms_lossscale.forward_state.reading import Reading
from ms_lossscale.function_network import FunctionNetwork

# Up to so many elements are copied in each step even if nothing is known to write them.
_FEW = 10**6
_SHOWN = 3
# Written by MindSpore's normalisation cells (`nn` and `mint.nn`), and by THOR's layers for their optimizer.
_WRITTEN_BY_LAYERS = (
    *("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"),
    *("matrix_a", "matrix_g", "matrix_a_cov", "matrix_g_cov", "a_normalizer", "g_normalizer"),
)


class SharedMemory:
    """A tensor, and a Parameter of another name that shares its memory."""

    def __init__(self, name, tensor):
        self.name, self._tensor = name, tensor
        # NumPy knows no bfloat16.
        self.parameter = Parameter(ops.deepcopy(Tensor(tensor)), name=name, requires_grad=False)
        self.share()

    def registered(self):
        """Returns the tensor that is in use now."""
        return self._tensor

    def share(self):
        """Shares the memory, again before the first step: loading may have given the tensor other memory."""
        self.parameter.assign_value(self.registered())


class SharedBuffer(SharedMemory):
    """A registered buffer of a cell, which compiled code sees as a constant, but not the Parameter."""

    def __init__(self, name, buffer, cell, attribute):
        self._cell, self._attribute = cell, attribute
        super().__init__(name, buffer)

    @property
    def place(self):
        """Returns where it is registered."""
        return id(self._cell), self._attribute

    def registered(self):
        return getattr(self._cell, self._attribute)


@dataclass(frozen=True)
class Found:
    """
    What a forward may write.

    Attributes:
        parameters (list[Parameter]): Those that MindSpore finds, in the networks' order, and those that were declared.
        unregistered (list[Parameter]): Those that are in no checkpoint, since they are in Python containers, say.
        buffers (list[SharedBuffer]): Registered buffers.
        reached (list): All objects that can be reached from the networks.
        taken (frozenset[str]): Names that other Parameters of the step have.
    """

    parameters: list
    unregistered: list
    buffers: list
    reached: list = field(default_factory=list)
    taken: frozenset = frozenset()

    @property
    def keys(self):
        """Returns what each of `names` is recognised by: a Parameter itself, or the place of a buffer."""
        return [*map(id, (*self.parameters, *self.unregistered)), *(buffer.place for buffer in self.buffers)]

    @property
    def names(self):
        """Returns a name for each, all different."""
        unregistered = [f"unregistered_{i}.{parameter.name}" for i, parameter in enumerate(self.unregistered)]
        buffers = [buffer.name for buffer in self.buffers]
        return [*(parameter.name for parameter in self.parameters), *unregistered, *buffers]

    def beyond(self, other):
        """Returns what is not found in another one."""
        known = {id(each) for each in (*other.parameters, *other.unregistered)}
        places = {buffer.place for buffer in other.buffers}
        return Found(
            [each for each in self.parameters if id(each) not in known],
            [each for each in self.unregistered if id(each) not in known],
            [buffer for buffer in self.buffers if buffer.place not in places],
        )

    def joined_with(self, other):
        return Found(
            self.parameters + other.parameters,
            self.unregistered + other.unregistered,
            self.buffers + other.buffers,
            taken=self.taken,
        )

    def shared(self):
        """
        Returns what another Parameter stands for in the step, by its name in `names`: the buffers, and what has no name
        of its own, which compiled code demands of Parameters.
        """
        counts = Counter([*self.taken, *(parameter.name for parameter in self.unregistered)])
        unregistered = zip(self.names[len(self.parameters) :], self.unregistered)
        stood_for = [SharedMemory(name, its) for name, its in unregistered if counts[its.name] > 1]
        return {each.name: each for each in (*stood_for, *self.buffers)}


def find_forward_state(owner, networks, declared=(), names_of_others=()):
    """
    Finds what the forward of networks may write, in addition to what the user has `declared`. Other Parameters of the
    step have the `names_of_others`.

    Small state is found by walking through objects, whatever code writes it. The source is read only where copying is
    expensive: for large state, weights, and frozen weights of MindSpore's layers. Warnings name `owner`.
    """
    things = _reached(owner, networks)
    cells = [thing for thing in things if isinstance(thing, nn.Cell)]
    buffers = _buffers(networks, cells)
    parameters = {id(thing): thing for thing in things if isinstance(thing, Parameter)}
    state = {**parameters, **{key: buffer for key, (_, buffer, *_) in buffers.items()}}
    reading = Reading(len(cells))
    reading.read(entries(things))
    if not reading.is_complete:
        reading.doubted.update((key, (each, "there is too much source to read")) for key, each in state.items())
    written = {key for key in reading.written if key in state} | _written_by_layers(cells) | set(map(id, declared))
    state.update((id(parameter), parameter) for parameter in declared)
    small = {*_without_gradient(cells, parameters), *buffers}
    elements = sum(state[key].size for key in small & written)
    may_be = {key for key in (*small, *reading.doubted) if key in state} - written
    for key in sorted(may_be, key=lambda key: state[key].size):
        elements += state[key].size
        if elements <= _FEW:
            written.add(key)
    names = {key: parameter.name for key, parameter in parameters.items()}
    names.update((key, path) for key, (path, *_) in buffers.items())
    _warn_of_undecided(
        owner, [(names[key], why) for key, (_, why) in reading.doubted.items() if key in names and key not in written]
    )
    registered = {id(p): p for network in networks for p in network.get_parameters()}
    registered.update((id(parameter), parameter) for parameter in declared)
    # The order of version 0.2, since checkpoints contain the numbers.
    positions = {id(cell): i for i, cell in enumerate(cells)}
    read = [key for key in reading.written if key in buffers]
    read.sort(key=lambda key: -positions[id(buffers[key][2])])
    its_buffers = [buffers[key] for key in dict.fromkeys((*read, *buffers)) if key in written]
    found = Found(
        [parameter for key, parameter in registered.items() if key in written],
        [parameter for key, parameter in parameters.items() if key in written and key not in registered],
        [SharedBuffer(f"buffer_{i}.{path}", *its) for i, (path, *its) in enumerate(its_buffers)],
        things,
        frozenset([*names_of_others, *(parameter.name for parameter in registered.values())]),
    )
    _warn_of_unregistered(owner, found.unregistered)
    return found


def may_write_inputs(networks):
    """Returns whether a network may write to its inputs."""
    reading, stand_in = Reading(len(_registered(networks))), Tensor(0.0)
    reading.read(networks, [stand_in])
    return id(stand_in) in {**reading.written, **reading.doubted} or not reading.is_complete


def _reached(owner, networks):
    """Returns the objects that can be reached, with all registered ones, and warns if there are too many others."""
    forget_imports()
    reach = Reach(networks)
    if reach.is_complete:
        return reach.things
    warnings.warn(
        f"For '{owner}', so many objects can be reached from the networks that only the first {len(reach.things)} were "
        f"looked at. State that the others hold and that MindSpore does not find among the networks' Parameters is not "
        f"restored by a skipped step. Pass such Parameters as forward_state=[...].",
        RuntimeWarning,
        stacklevel=2,
    )
    return list({id(each): each for each in (*reach.things, *_registered(networks))}.values())


def _registered(networks):
    """Returns the cells and Parameters that MindSpore finds."""
    cells = [cell for network in networks for _, cell in network.cells_and_names()]
    return [*cells, *(parameter for network in networks for parameter in network.get_parameters())]


def _buffers(networks, cells):
    """Returns for each registered buffer its path, the buffer, its cell, and its name there."""
    paths = {id(cell): f"{path}." if path else "" for network in networks for path, cell in network.cells_and_names()}
    return {
        id(buffer): (paths.get(id(cell), "unregistered.") + name, buffer, cell, name)
        for cell in cells
        for name, buffer in cell._buffers.items()
        if buffer is not None
    }


def _without_gradient(cells, parameters):
    """Returns the Parameters without gradient that do not belong to MindSpore's layers. A function's are the user's."""
    layers = [cell for cell in cells if not is_users(type(cell)) and not isinstance(cell, FunctionNetwork)]
    of_layers = {id(each) for cell in layers for each in cell._params.values()}
    return [key for key, each in parameters.items() if not each.requires_grad and key not in of_layers]


def _written_by_layers(cells):
    found = (cell._params.get(name) for cell in cells for name in _WRITTEN_BY_LAYERS)
    return {id(each) for each in found if isinstance(each, Parameter) and not each.requires_grad}


def _warn_of_undecided(owner, undecided):
    if undecided:
        warnings.warn(
            f"For '{owner}', it can't be told whether the forward writes "
            f"{listed([name for name, _ in undecided], _SHOWN)}, since {undecided[0][1]}; they are too large to be "
            f"copied in each step just in case, so a skipped step does not restore them. Pass those that it writes as "
            f"forward_state=[...].",
            RuntimeWarning,
            stacklevel=2,
        )


def _warn_of_unregistered(owner, unregistered):
    if unregistered:
        warnings.warn(
            f"For '{owner}', {listed([parameter.name for parameter in unregistered], _SHOWN)} can be written by the "
            f"forward, but MindSpore does not find them among the network's Parameters, since they are in a Python "
            f"list, a dict or a global, for example. A skipped step restores them, but no checkpoint has them. Put the "
            f"cells into an nn.CellList or nn.CellDict, or pass the Parameters as forward_state=[...].",
            RuntimeWarning,
            stacklevel=2,
        )
