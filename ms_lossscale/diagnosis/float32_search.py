"""Searches for the cells that need float32, as few and as small as can be found. Each set of cells is tried."""

import math
import re

from ms_lossscale.diagnosis.float32_advice import Widening

# The number of rounds that follow one overflow each, before its neighbours are added, too.
_PATIENCE = 6
# How many cells with weights of lost gradients are tried in float32, to widen the range of scales.
_OWNERS = 3


def needed_cells(trials):
    """Returns the cells' names, or whole networks if nothing less suffices; and why graph mode fails, or None."""
    names = [] if trials.are_finite([]) else _smallest(trials, _fewest(trials, _enough(trials), []))
    return _in_graph_mode(trials, names)


def _in_graph_mode(trials, names):
    """
    Widens the cells until graph mode succeeds, too, if it ever does. There, a cell only casts its inputs. What it
    computes from the output of float16 cells inside it is float16 still, and operators may refuse mixed dtypes.
    """
    tried = names
    while True:
        error = trials.error_in_graph_mode(tried)
        if error is None:
            return _back(trials, tried, names), None
        wider = _outermost(trials, list(dict.fromkeys((trials.around(each) or [each])[0] for each in tried)))
        if wider == tried:
            return names, error
        tried = wider


def _back(trials, wider, names):
    """Returns the wider cells, but the original ones instead of those that need not be wider."""
    for name in [each for each in wider if each not in names]:
        inside = [each for each in names if trials.covers([name], each)]
        rest = [each for each in wider if each != name] + inside
        if len(wider) > 1 and trials.error_in_graph_mode(rest) is None:
            wider = rest
    return wider


def _enough(trials):
    """Goes from each overflow to the next. Returns cells that suffice, though perhaps not all are needed."""
    chosen, patterns, reach = [], set(), 0
    for number in range(len(trials.cells)):
        found = trials.look(chosen)
        if found is None:
            break
        new = [found.suspect]
        if _pattern(found.suspect) in patterns:
            # It is the same layer of another block: all blocks may be alike.
            new = [each for each in trials.cells if _pattern(each) == _pattern(found.suspect)]
        patterns.add(_pattern(found.suspect))
        if trials.covers(chosen, found.suspect) or number >= _PATIENCE:
            # It already computes in float32, but its inputs come from others.
            reach = 2 * reach or 1
            new += _neighbours(trials, found, reach, chosen)
        new = [each for each in dict.fromkeys(new) if not trials.covers(chosen, each)]
        chosen = new and _outermost(trials, chosen + new)
        if not chosen:
            break
    return chosen if chosen and trials.are_finite(chosen) else list(trials.roots)


def _neighbours(trials, found, reach, chosen):
    """Returns the cells that ran closest to the suspect, and the one around it unless it is a whole network."""
    order = [each for each in found.order if each not in trials.roots]
    place = order.index(found.suspect) if found.suspect in order else len(order)
    near = order[max(0, place - reach) : place + reach + 1]
    return near + [each for each in trials.around(found.suspect) if each not in trials.roots and reach > 1]


def _outermost(trials, names):
    return [each for each in names if not trials.covers([other for other in names if other != each], each)]


def _fewest(trials, names, kept):
    """Returns as few of these as suffice together with `kept`: leaving one more out makes it fail."""
    size = len(names) // 2 if len(names) > 3 else 1
    while True:
        before, i = len(names), 0
        while i < len(names):
            rest = names[:i] + names[i + size :]
            if trials.are_finite(kept + rest):
                names = rest
            else:
                i += size
        if size == 1 and len(names) == before:
            return names
        size = max(1, size // 2)


def _smallest(trials, names):
    """Replaces cells by the cells inside them, where some of those suffice."""
    for name in names:
        inside, rest = trials.inside(name), [each for each in names if each != name]
        if inside and trials.are_finite(rest + inside):
            return _smallest(trials, _fewest(trials, rest + _fewest(trials, inside, rest), []))
    return names


def widening(trials, names, loss_scale):
    """
    Returns the cell that, in float32 in addition to these, widens the range of loss scales most, or None if no
    gradients are lost at the largest one.
    """
    lost = trials.lost_gradients(names, loss_scale)
    if not lost:
        return None
    above = trials.look(names, 2 * loss_scale)
    candidates = [above.suspect, above.cell] if above is not None else []
    candidates += list(dict.fromkeys(trials.owner(each) for each in lost))[:_OWNERS]
    needed = _smallest_that_keeps(trials, names, lost, 2 * loss_scale, 2.0**24) or 2 * loss_scale
    found = []
    for cell in dict.fromkeys(each for each in candidates if not trials.covers(names, each)):
        wider = [*names, cell]
        if not trials.are_finite(wider):
            continue
        largest = trials.largest_scale(wider, False)
        smallest = _smallest_that_keeps(trials, wider, lost, trials.smallest_scale, largest) or needed
        powers = round(math.log2(largest / loss_scale) + math.log2(max(needed / smallest, 1.0)))
        found.append(Widening(cell, powers, largest, lost))
    best = max(found, key=lambda each: each.powers, default=None)
    return best if best is not None and best.powers > 0 else None


def _smallest_that_keeps(trials, names, lost, low, high):
    """Returns the smallest power of two from `low` to `high` that keeps these gradients, None if there is none."""
    low, high = math.ceil(math.log2(low)), math.floor(math.log2(high))

    def keeps(exponent):
        return not set(lost) & set(trials.lost_gradients(names, 2.0**exponent))

    # If they overflow at the largest one, a smaller one may do.
    high = next((each for each in range(high, low - 1, -2) if keeps(each)), None)
    if high is None:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle + 1, high)
    return 2.0**high


def _pattern(name):
    """Returns what the names of corresponding cells in several blocks have in common."""
    return re.sub(r"\d+", "#", name)
