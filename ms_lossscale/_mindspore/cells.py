"""What a Cell is: whose class it has, and what is registered in it."""

from collections.abc import Iterable
from pathlib import Path

from mindspore import nn


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
