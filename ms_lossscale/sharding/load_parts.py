"""What of a checkpoint a sharded optimizer loads: its own rank's part, or its share of a whole one."""

from mindspore import Tensor

from ms_lossscale.sharding.layout import LAYOUT, MASTER, SHARD, Layout, part_of, values_of
from ms_lossscale.sharding.sharded_optimizer import ShardedOptimizer

_NOTHING = " Nothing was loaded."


class LoadedParts:
    """Gives each sharded optimizer of a training cell, of all its optimizers, its own of what is loaded."""

    def __init__(self, owner, optimizers):
        self._owner = owner
        self._sharded = [each for each in optimizers if isinstance(each, ShardedOptimizer) and each.is_split]
        self.layouts = [optimizer.layout for optimizer in self._sharded]

    def check(self):
        """After MindSpore's own functions may have loaded something: raises unless it was this rank's part."""
        for optimizer in self._sharded:
            _check_own(self._owner, optimizer.layout_read, optimizer.layout)

    def of(self, own, parameters):
        """
        What the cell, whose Parameters are `own`, loads of a rank's part or of what the plain optimizer would have
        saved: a part stands for each whole value that is split. Raises a ValueError if it is the part of another rank,
        or of another number of ranks, or if a shape does not fit.
        """
        for optimizer in self._sharded:
            parameters = _own_part(self._owner, optimizer, parameters)
        # The masters of weights that have none here.
        return {
            name: value
            for name, value in parameters.items()
            if name in own or not (name.startswith(MASTER) and name[len(MASTER) :] in own)
        }


def _own_part(owner, optimizer, parameters):
    layout, its_name = optimizer.layout_read, optimizer.layout.name
    if its_name in parameters:
        _check_own(owner, layout, parameters[its_name], _NOTHING)
        return parameters
    prefix = its_name[: -len(LAYOUT)]
    if any(name.startswith(prefix + SHARD) for name in parameters):
        raise ValueError(
            f"For '{owner}.load_state_dict', 'parameters' hold a rank's part of an optimizer's state, but not "
            f"'{its_name}', which says of which rank. Pass what mindspore.load_checkpoint returns as it is.{_NOTHING}"
        )
    parameters = dict(parameters)
    own = {parameter.name: parameter for parameter in optimizer.get_parameters()}
    for name, weight in layout.splits().items():
        if name in layout.weights:
            whole = parameters.pop(MASTER + name, parameters.get(name))
        else:
            whole = parameters.pop(prefix + name, None)
        if whole is not None:
            shard, shape = prefix + SHARD + name, layout.weights[weight]
            if list(whole.shape) != shape:
                raise ValueError(
                    f"For '{owner}.load_state_dict', {name!r} must have the shape {tuple(shape)}, but got "
                    f"{tuple(whole.shape)}.{_NOTHING}"
                )
            dtype = values_of(own[shard]).dtype
            parameters[shard] = Tensor(part_of(values_of(whole), layout.rank, layout.ranks, dtype))
    parameters[its_name] = optimizer.layout
    return parameters


def _check_own(owner, layout, tensor, end=""):
    """Raises a ValueError unless a layout that is loaded is that of this rank."""
    try:
        other = Layout.of(tensor)
    except ValueError:
        other = None
    if other == layout:
        return
    if other is None or other.of_all()._replace(ranks=0) != layout.of_all()._replace(ranks=0):
        what = "of another training: its weights or its optimizer's state are others"
    else:
        what = f"that of rank {other.rank} of {other.ranks}"
    raise ValueError(
        f"For '{owner}', each rank must load its own part of what was saved, here that of rank {layout.rank} of "
        f"{layout.ranks}, but got one that is {what}. Load this rank's file, or, for another number of ranks, "
        f"cell.load_state_dict(merge_shards([...])) with the files of all ranks.{end}"
    )
