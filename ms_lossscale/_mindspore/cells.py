"""What a Cell is: its class, what is registered in it, and its precision, which may be float32 for a while."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable

from mindspore import dtype as mstype
from mindspore import nn
from mindspore._c_expression import Cell_, MixedPrecisionType
from mindspore.train.amp import _OutputTo16


def is_library_cell(cell: nn.Cell) -> bool:
    """Returns whether a Cell's class is MindSpore's or this package's, not a user's own."""
    return type(cell).__module__.partition(".")[0] in ("mindspore", "ms_lossscale")


def is_rewritten(cell: nn.Cell) -> bool:
    """Returns whether amp's O1, or a white list, wrote the cell's class: its file is in the folder for such classes."""
    construct = vars(type(cell)).get("construct")
    return construct is not None and Path(construct.__code__.co_filename).parent.name == "rewritten_network"


def written_class(cell: nn.Cell) -> type[nn.Cell]:
    """Returns the class of a cell as its author wrote it."""
    return type(cell).__mro__[1] if is_rewritten(cell) else type(cell)


def registered_cells(cell: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
    """Returns the attributes and cells in a cell. Its own `name_cells` gives a cell of two names only once."""
    return [(attribute, child) for attribute, child in cell._cells.items() if child is not None]


def has_forward_pre_hook(cell: nn.Cell) -> bool:
    """Returns whether a hook may change the inputs of a cell's `construct`. No public function tells."""
    return bool(cell._forward_pre_hook)


@contextlib.contextmanager
def keeping_modes(cells: Iterable[nn.Cell]) -> Iterator[None]:
    """A context after which each of these cells, and each inside them, is in training or not as before."""
    modes = [(inside, inside.training) for cell in cells for _, inside in cell.cells_and_names()]
    try:
        yield
    finally:
        for inside, training in modes:
            inside.add_flags(training=training)


# Where a cell keeps its precision: for `to_float` (with a copy of its flags in a dict) and amp's "auto" level.
_OF_PRECISION = ("_func_graph_flags", "fp16", "fp32", "bf16", "_cell_init_args", "amp_strategy", "construct", "dtype")


def put_in_float32(cell: nn.Cell) -> list[Callable[[], None]]:
    """
    Makes a cell and those inside it compute in float32, whatever has put them into float16. Returns functions that
    restore every attribute.

    `to_float` alone does not reverse the levels of amp. O1 replaces cells by subclasses whose rewritten source has
    casts in it; O2 wraps the cells that stay in float32, and casts their output; "auto" wraps the `construct` of the
    whole network. Nothing public shows or reverses that.
    """
    return [_put_alone_in_float32(inside) for _, inside in cell.cells_and_names()]


@contextlib.contextmanager
def in_float32(cells: Iterable[nn.Cell]) -> Iterator[None]:
    """A context in which these cells, and those inside them, compute in float32."""
    # It goes in reverse order, since one of the cells may be inside another.
    with contextlib.ExitStack() as afterwards:
        for restore in itertools.chain(*map(put_in_float32, cells)):
            afterwards.callback(restore)
        yield


def _put_alone_in_float32(cell):
    before_class = type(cell)
    attributes = vars(cell)
    precision = cell.mixed_precision_type
    before = {name: attributes[name] for name in _OF_PRECISION if name in attributes}
    if "_func_graph_flags" in before:
        before["_func_graph_flags"] = dict(before["_func_graph_flags"])

    cell.add_flags(fp16=False, fp32=True, bf16=False)
    if is_rewritten(cell):
        cell.__class__ = written_class(cell)
    if isinstance(cell, _OutputTo16):
        cell.dtype = mstype.float32
    if attributes.pop("amp_strategy", None) is not None:
        attributes.pop("construct", None)

    def restore():
        cell.__class__ = before_class
        cell.mixed_precision_type = precision
        Cell_.set_mixed_precision_type(cell, precision or MixedPrecisionType.NOTSET)
        for name in _OF_PRECISION:
            attributes.pop(name, None)
        attributes.update(before)

    return restore


def is_cast(cell: nn.Cell) -> bool:
    """Returns whether `to_float` or any level of amp makes a cell, or some of its operators, compute in 16 bits."""
    flags = cell.get_flags()
    return bool(flags.get("fp16") or flags.get("bf16") or "amp_strategy" in vars(cell) or is_rewritten(cell))


def casts_its_output(cell: nn.Cell) -> bool:
    """Returns whether amp's O2, or a black list, made this cell to cast the output of one that stays in float32."""
    return isinstance(cell, _OutputTo16)
