"""Where one loss scale does not serve a whole network: the cell whose float32 widens the range of scales most."""

import math
from typing import NamedTuple

# So many cells are tried that overflow above the largest scale, and that have the weights whose gradients are lost.
_TRIED = 3


class Widening(NamedTuple):
    """
    What one more cell in float32 gains.

    - **cell** (str) - The cell's name.
    - **powers** (int) - By how many powers of two the range of useful loss scales becomes wider.
    - **loss_scale** (float) - The largest power of two at which the batches are then finite.
    - **lost** (list[str]) - The weights whose gradients are lost at the largest scale without it.
    """

    cell: str
    powers: int
    loss_scale: float
    lost: list[str]

    def __str__(self) -> str:
        lost = ", ".join(self.lost[:_TRIED]) + (" and more" if len(self.lost) > _TRIED else "")
        return (
            f"At the largest loss scale float16 loses most gradients of {lost}. {self.cell} in float32, too, widens "
            f"the range of scales most, by {self.powers} powers of two: cells[{self.cell!r}]"
            f".to_float(mindspore.float32)"
        )


def widest(trials, names, loss_scale):
    """The cell whose float32 widens the range most; None if no gradients are lost at the largest scale."""
    lost = trials.lost_gradients(names, loss_scale)
    if not lost:
        return None
    above = trials.look(names, 2 * loss_scale)
    limiting = [above.suspect, above.cell] if above is not None else []
    owners = list(dict.fromkeys(trials.owner(each) for each in lost))[:_TRIED]
    needed = _smallest_that_keeps(trials, names, lost, 2 * loss_scale, 2.0**24) or 2 * loss_scale
    found = []
    for cell in dict.fromkeys(each for each in limiting + owners if not trials.covers(names, each)):
        wider = [*names, cell]
        largest = trials.largest_scale(wider, False) if trials.are_finite(wider) else loss_scale
        smallest = _smallest_that_keeps(trials, wider, lost, trials.smallest_scale, largest) or needed
        powers = round(math.log2(largest / loss_scale) + math.log2(max(needed / smallest, 1.0)))
        found.append(Widening(cell, powers, largest, [name for _, name in lost]))
    best = max(found, key=lambda each: each.powers, default=None)
    return best if best is not None and best.powers > 0 else None


def _smallest_that_keeps(trials, names, lost, low, high):
    """The smallest power of two from `low` to `high` at which these gradients are not lost; None if they all are."""
    low, high = math.ceil(math.log2(low)), math.floor(math.log2(high))

    def keeps(exponent):
        return not set(lost) & set(trials.lost_gradients(names, 2.0**exponent))

    if low > high:
        return None
    if not keeps(high):
        # Where they overflow instead, a smaller one may do.
        high = next((each for each in range(high - 2, low - 1, -2) if keeps(each)), None)
        if high is None:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle + 1, high)
    return 2.0**high
