"""Merges the checkpoints of all ranks, whose optimizer was sharded, into that of the plain optimizer."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Union

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from ms_lossscale._arguments import StrPath, check_tensors_by_name, describe, listed
from ms_lossscale.sharding.layout import LAYOUT, MASTER, SHARD, Layout, shard_length, values_of, whole_of

_OWNER = "merge_shards"
_SHOWN = 5
# What a training cell keeps of an accumulation cycle, and the counts that must be equal on all ranks.
_GATHERED = re.compile(r"(?:^|\.)accumulation\.(.+)$")
_COUNTS = re.compile(
    r"(^|\.)(step_counters\.(\w+_steps|retries)|accumulation\.(micro_)?steps|alternation\.(windows|calls|steps))$"
)

Checkpoint = Mapping[str, Tensor]


def merge_shards(checkpoints: Sequence[Union[StrPath, Checkpoint]]) -> dict[str, Parameter]:
    """
    Merges the checkpoints that all ranks saved from a training cell with a :class:`ShardedOptimizer`. The result is
    what training with the plain optimizer would have saved, with its names and shapes.

    You can load it into a cell with the plain optimizer, and with `load_state_dict` into a cell with a sharded
    optimizer on any number of ranks. If a weight is not float32, the result also has its float32 master copy, named
    ``master.`` and the weight's name, and the optimizer's state is float32. Values that each rank has for itself, such
    as BatchNorm's statistics, are those of rank 0. Within an accumulation cycle, the accumulated gradients are averaged
    over the ranks, so that any number of ranks can continue from there.

    Args:
        checkpoints (Union[list, tuple]): For each rank, in the order of the ranks, the file name of its checkpoint, or
            the dict that :func:`mindspore.load_checkpoint` returned.

    Returns:
        dict from names to Parameters, for :func:`mindspore.load_param_into_net` and for `load_state_dict` of training
        cells.

    Raises:
        TypeError: If `checkpoints` is not a list of file names or dicts.
        ValueError: If a checkpoint can't be read or is empty; if a rank is missing, duplicated or out of order; if a
            part is incomplete or does not belong to the others. If the ranks sum their gradients instead of averaging
            them, and saved within an accumulation cycle.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> import mindspore
        >>> from mindspore import nn
        >>> from ms_lossscale import ScaledTrainOneStepCell, ShardedOptimizer, merge_shards
        >>> network = nn.Dense(4, 1)
        >>> optimizer = ShardedOptimizer(network.trainable_params(), nn.Adam)
        >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
        >>> path = f"{tempfile.mkdtemp()}/rank_0.ckpt"
        >>> mindspore.save_checkpoint(cell, path)  # On each of its ranks; here there is one.
        >>> merged = merge_shards([path])
        >>> "moment1.weight" in merged
        True
    """
    if isinstance(checkpoints, (str, os.PathLike)) or not isinstance(checkpoints, Sequence):
        raise TypeError(
            f"For '{_OWNER}', the argument 'checkpoints' must be a list with a file name or a dict for each rank, but "
            f"got {describe(checkpoints)}."
        )
    if not checkpoints:
        raise ValueError(f"For '{_OWNER}', the argument 'checkpoints' must not be empty. Pass each rank's checkpoint.")
    parts = [_Part(i, each) for i, each in enumerate(checkpoints)]
    if len(parts) == 1 and not parts[0].layouts:
        # With one rank, it is the plain optimizer's checkpoint.
        return _as_parameters(parts[0].values)
    _check_ranks(parts)
    _check_parts(parts)
    return _as_parameters(_merged(parts))


class _Part:
    """What one rank saved: its values, and the layouts of its sharded optimizers, by the prefixes of their names."""

    def __init__(self, i, checkpoint):
        self.name = f"checkpoints[{i}]"
        if isinstance(checkpoint, (str, os.PathLike)):
            self.name += f" ({os.fspath(checkpoint)})"
            try:
                checkpoint = mindspore.load_checkpoint(os.fspath(checkpoint))
            except (ValueError, RuntimeError, OSError, TypeError) as error:
                reason = str(error).splitlines()[0].rstrip(".")
                self.fail(f"can't be read: {reason}", "Check the file name, or save it again.", error)
        check_tensors_by_name(
            f"For '{_OWNER}', {self.name} must be a file name, or a dict from names to Parameters", checkpoint
        )
        if not checkpoint:
            self.fail("is empty", "Pass what mindspore.load_checkpoint returns.")
        self.values = dict(checkpoint)
        self.layouts = {}
        for name in [name for name in self.values if name.endswith(LAYOUT)]:
            try:
                self.layouts[name[: -len(LAYOUT)]] = Layout.of(self.values.pop(name))
            except ValueError as error:
                self.fail(f"is damaged: {error}", "Save it again.", error)

    def fail(self, what, cure, cause=None):
        raise ValueError(f"For '{_OWNER}', {self.name} {what}. {cure} Nothing was merged.") from cause

    def place(self):
        """Returns the rank and the number of ranks, which all its layouts have in common."""
        places = {(layout.rank, layout.ranks) for layout in self.layouts.values()}
        if not places:
            self.fail(
                "holds no part of a sharded optimizer", "Pass what the ranks saved of a cell with ShardedOptimizer."
            )
        if len(places) > 1:
            self.fail(f"holds parts of different ranks: {sorted(places)}", "Pass files as they were saved.")
        return places.pop()

    def of_all(self):
        """Returns what all parts have in common of its layouts."""
        return {prefix: layout.of_all() for prefix, layout in self.layouts.items()}

    def shards(self):
        """Yields for each split value its name, that in a merged checkpoint, that of its weight, and its layout."""
        for prefix, layout in self.layouts.items():
            for name, weight in layout.splits().items():
                merged = prefix + name
                if name in layout.weights:
                    merged = MASTER + name if name in layout.masters else None
                yield prefix + SHARD + name, merged, weight, layout


def _check_ranks(parts):
    """Raises unless these are the parts of all ranks, each once, in order."""
    got, jobs = zip(*(part.place() for part in parts))
    ranks = max(jobs)
    faults = [f"rank {rank} is missing" for rank in range(ranks) if rank not in got]
    faults += [f"rank {rank} comes {got.count(rank)} times" for rank in sorted(set(got)) if got.count(rank) > 1]
    faults += [f"{part.name} is of a job with {its} ranks" for part, its in zip(parts, jobs) if its != ranks]
    if not faults:
        faults = [f"{part.name} is that of rank {rank}" for i, (part, rank) in enumerate(zip(parts, got)) if i != rank]
    if faults:
        raise ValueError(
            f"For '{_OWNER}', the argument 'checkpoints' must hold the checkpoints of all {ranks} ranks, in order, but "
            f"{listed(faults, _SHOWN)}. Nothing was merged."
        )


def _check_parts(parts):
    """Raises unless the parts are complete, and from the same moment of the same training."""
    first = parts[0]
    names = set().union(*(part.values for part in parts))
    names.update(weight for layout in first.layouts.values() for weight in layout.weights)
    names.update(shard for shard, *_ in first.shards())
    for part in parts:
        if part.of_all() != first.of_all():
            part.fail(f"has other weights, or other state, than {first.name}", "Pass parts of one training.")
        missing = sorted(names - part.values.keys())
        if missing:
            part.fail(f"lacks {listed(missing, _SHOWN)}", "Save it again, or pass parts of one training.")
        for shard, _, weight, layout in part.shards():
            wanted = (shard_length(math.prod(layout.weights[weight]), layout.ranks),)
            got = tuple(part.values[shard].shape)
            if got != wanted:
                part.fail(f"must have '{shard}' of the shape {wanted}, but it has {got}", "Save it again.")
        same = [name for layout in part.layouts.values() for name in layout.weights]
        same += [prefix + name for prefix, layout in part.layouts.items() for name in layout.shared]
        same += [name for name in first.values if _COUNTS.search(name)]
        for name in same:
            if not np.array_equal(*(values_of(each.values[name]) for each in (part, first)), equal_nan=True):
                part.fail(
                    f"has another '{name}' than {first.name}",
                    "Pass parts that were saved after the same step of one training.",
                )


def _merged(parts):
    first = parts[0]
    shards = {name: rest for name, *rest in first.shards()}
    merged = {}
    for name, value in first.values.items():
        if name not in shards:
            merged[name] = _of_cycle(name, parts) if _GATHERED.search(name) else value
            continue
        merged_name, weight, layout = shards[name]
        if merged_name is not None:
            whole = whole_of([values_of(part.values[name]) for part in parts], layout.weights[weight])
            merged[merged_name] = Tensor(whole)
    return merged


def _of_cycle(name, parts):
    """Merges a value of an accumulation cycle: averages gradients, or tells whether any rank overflowed."""
    values = [values_of(part.values[name]) for part in parts]
    what = _GATHERED.search(name)[1]
    if what == "overflow":
        return Tensor(np.logical_or.reduce(values))
    if what not in parts[0].values or not any(value.any() for value in values):
        return parts[0].values[name]
    for part in parts:
        if not all(layout.averages for layout in part.layouts.values()):
            part.fail(
                "was saved within an accumulation cycle by ranks that sum their gradients, of which each has its own "
                "share",
                "Save at the end of a cycle, or call flush() before.",
            )
    return Tensor(np.mean(values, axis=0, dtype=np.float32))


def _as_parameters(values):
    return {name: Parameter(Tensor(value), name=name, requires_grad=False) for name, value in values.items()}
