"""Finds the Parameters and buffers that a skipped step must restore: those that MindSpore finds and does not train."""

from dataclasses import dataclass

from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale._user_warnings import warn_user

# Up to so many elements are copied in each step, whether or not anything writes them.
_FEW = 10**6
# Written by MindSpore's normalisation cells (`nn` and `mint.nn`), and by THOR's layers for their optimizer.
_WRITTEN_BY_LAYERS = (
    *("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"),
    *("matrix_a", "matrix_g", "matrix_a_cov", "matrix_g_cov", "a_normalizer", "g_normalizer"),
)
# Not written by MindSpore's layers, nor state that others keep in them.
_WEIGHTS_OF_LAYERS = ("weight", "bias", "gamma", "beta", "embedding_table")


class SharedBuffer:
    """A registered buffer, which compiled code sees as a constant, and a Parameter that shares its memory."""

    def __init__(self, name, cell, attribute):
        self.name, self._cell, self._attribute = name, cell, attribute
        # NumPy knows no bfloat16.
        self.parameter = Parameter(ops.deepcopy(Tensor(self.registered())), name=name, requires_grad=False)
        self.share()

    @property
    def place(self):
        """Returns where it is registered."""
        return id(self._cell), self._attribute

    def registered(self):
        """Returns the buffer that is in use now."""
        return getattr(self._cell, self._attribute)

    def share(self):
        """Shares the memory, again before the first step: loading may have given the buffer other memory."""
        self.parameter.assign_value(self.registered())


@dataclass(frozen=True)
class Found:
    """What a forward may write: Parameters, and buffers."""

    parameters: list
    buffers: list

    @property
    def keys(self):
        """Returns what each of `names` is recognised by: a Parameter itself, or the place of a buffer."""
        return [*map(id, self.parameters), *(buffer.place for buffer in self.buffers)]

    @property
    def names(self):
        """Returns a name for each, all different."""
        return [its.name for its in (*self.parameters, *self.buffers)]


def find_written_state(owner, networks, declared=()):
    """
    Finds what the forward of networks may write: the statistics of MindSpore's layers; Parameters without gradient and
    buffers, up to a million elements in all, but not weights of MindSpore's layers; and what the user has `declared`.
    """
    named = {id(cell): (path, cell) for network in networks for path, cell in network.cells_and_names()}.values()
    certain, may_be, buffers = {id(its): its for its in declared}, [], []
    for path, cell in named:
        # A skipped step must change the state of a loss scale, which a transform may hold.
        if isinstance(cell, FixedAttributes):
            continue
        _warn_of_unregistered(owner, cell)
        frozen = {name: its for name, its in cell._params.items() if its is not None and not its.requires_grad}
        certain.update((id(its), its) for name, its in frozen.items() if name in _WRITTEN_BY_LAYERS)
        is_layer = type(cell).__module__.startswith("mindspore.")
        may_be += [its for name, its in frozen.items() if not (is_layer and name in _WEIGHTS_OF_LAYERS)]
        buffers += [(path, cell, name, its) for name, its in cell._buffers.items() if its is not None]
    elements, small = 0, set()
    for its in sorted((*may_be, *(its for *_, its in buffers)), key=lambda its: its.size):
        elements += 0 if id(its) in certain else its.size
        if elements <= _FEW:
            small.add(id(its))
    registered = {id(its): its for network in networks for its in network.get_parameters()} | certain
    return Found(
        [its for key, its in registered.items() if key in small or key in certain],
        [
            SharedBuffer(".".join(filter(None, (f"buffer_{i}", path, name))), cell, name)
            for i, (path, cell, name, its) in enumerate(buffers)
            if id(its) in small
        ],
    )


def _warn_of_unregistered(owner, cell):
    """Warns of cells and Parameters that MindSpore does not find, since they are in a Python list, say."""
    for name, its in vars(cell).items():
        held = its.values() if type(its) is dict else its if type(its) in (list, tuple) else ()
        registered = {id(each) for each in (*cell._cells.values(), *cell._params.values())}
        strangers = (each for each in held if isinstance(each, (nn.Cell, Parameter)) and id(each) not in registered)
        if not name.startswith("_") and any(True for _ in strangers):
            warn_user(
                f"For '{owner}', MindSpore does not find the cells or Parameters in the {type(its).__name__} '{name}' "
                f"of {type(cell).__name__}: no checkpoint has them, and no skipped step restores them. Put them into "
                f"an nn.CellList, nn.CellDict or ParameterTuple."
            )
