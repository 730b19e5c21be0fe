"""How an accumulation cycle adds up its calls, as a checkpoint tells it."""

from typing import NamedTuple

# The bits of its code; then there is one for each network.
_DROPS, _MANUAL, _FIRST = 1, 2, 4


class CycleSettings(NamedTuple):
    """
    How a cycle adds up its calls. One that was begun otherwise can't go on: its sums are to be divided by something
    else.

    Args:
        drops (bool): Whether calls that overflowed are dropped.
        is_manual (bool): Whether it is that of a ManualStep, where each call says whether its loss has a weight.
        weighted (tuple[bool]): For each network whether its losses have weights.
    """

    drops: bool
    is_manual: bool
    weighted: tuple[bool, ...]

    @property
    def code(self) -> int:
        """The number that a checkpoint has for them."""
        bits = (_FIRST << i for i, weighted in enumerate(self.weighted) if weighted)
        return self.drops * _DROPS + self.is_manual * _MANUAL + sum(bits)

    @classmethod
    def of_code(cls, code: int, networks: int) -> "CycleSettings":
        """Returns what such a number says of so many networks."""
        weighted = tuple(bool(code & _FIRST << i) for i in range(networks))
        return cls(bool(code & _DROPS), bool(code & _MANUAL), weighted)
