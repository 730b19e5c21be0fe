"""The names of a cell's own Parameters: they stay what they are, after a prefix, whatever holds the cell."""

from collections.abc import Iterable, Iterator
from typing import Optional

from mindspore import Parameter, nn

_PACKAGE = __name__.partition(".")[0]
# Parts of paths, and what version 0.5 had there.
_MOVED = {"transaction.norms.of_network.": "transaction.update.clips."}


class OwnNames(nn.Cell):
    """
    Holds Parameters under names that do not depend on where the cell keeps them. MindSpore names each Parameter of a
    held cell by the first path that leads to it, and comes by this cell first: so it puts the holder's prefix before
    these names. Parameters that are hidden from MindSpore follow.

    Args:
        names (dict): The Parameters by name.
        hidden (list[Parameter]): Those that are hidden.
        never_shared (Parameter): One of the former that nothing else names.
    """

    def __init__(self, names: dict[str, Parameter], hidden: list[Parameter], never_shared: Parameter) -> None:
        super().__init__(auto_prefix=False)
        # As attributes they could not have such names.
        self._params.update(names)
        object.__setattr__(self, "_hidden", [(parameter, parameter.name) for parameter in hidden])
        object.__setattr__(self, "_never_shared", (never_shared, never_shared.name))

    def prefix(self) -> str:
        """Returns what the holder has put before the names."""
        parameter, name = self._never_shared
        return parameter.name[: -len(name)] if parameter.name.endswith(name) else ""

    def follow(self) -> None:
        """Names the hidden Parameters as the others."""
        prefix = self.prefix()
        for parameter, name in self._hidden:
            if parameter.name != prefix + name:
                parameter.name = prefix + name

    def by_path(self, cell: nn.Cell) -> dict[str, str]:
        """
        Returns the present names by those that version 0.5 gave in the same holder: where in the cell they were kept.
        """
        own = set(map(id, self._params.values()))
        paths: dict[int, tuple[str, str]] = {}
        for path, part in nn.Cell.cells_and_names(cell):
            for name, parameter in part.parameters_and_names(path, expand=False):
                for now, earlier in _MOVED.items():
                    name = name.replace(now, earlier)
                paths.setdefault(id(parameter), (self.prefix() + name, parameter.name))
        return dict(names for key, names in paths.items() if key in own)


class NamesItself(nn.Cell):
    """Base class of cells whose own Parameters have names of their own."""

    _own_names: Optional[OwnNames] = None

    def _name_own(self, names_of_others: set[int], names: dict[int, str], never_shared: Parameter) -> None:
        """
        Names the Parameters, once all have been made: not those of which the ids are `names_of_others`, and some, by
        their ids, as `names` says.
        """
        parameters = [parameter for parameter in self.get_parameters() if id(parameter) not in names_of_others]
        named = {names.get(id(parameter), parameter.name): parameter for parameter in parameters}
        hidden = _hidden_in(self, names_of_others.union(map(id, parameters)))
        # Hidden from MindSpore, which comes by it in `cells_and_names`.
        object.__setattr__(self, "_own_names", OwnNames(named, hidden, never_shared))

    # All that MindSpore does with names goes through it, also if another Cell holds this one.
    def cells_and_names(self, cells: Optional[set] = None, name_prefix: str = "") -> Iterator[tuple[str, nn.Cell]]:
        own_names = self._own_names
        if own_names is None:
            yield from super().cells_and_names(cells, name_prefix)
            return
        for path, cell in super().cells_and_names(cells, name_prefix):
            yield path, cell
            if cell is self:
                yield path, own_names
        own_names.follow()


def _hidden_in(cell: nn.Cell, known: Iterable[int]) -> list[Parameter]:
    """Returns the Parameters that MindSpore does not find in the parts of a cell that are this package's."""
    parts = [part for _, part in cell.cells_and_names() if type(part).__module__.partition(".")[0] == _PACKAGE]
    values = [value for part in parts for value in vars(part).values()]
    each = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    hidden = {id(item): item for item in each if isinstance(item, Parameter) and id(item) not in known}
    return list(hidden.values())
