"""Trying batches with some of a network's cells in float32."""

import contextlib
import itertools
import math
from typing import NamedTuple

import mindspore
import numpy as np

from ms_lossscale._mindspore import forget_failed_calls, in_float32, is_rewritten
from ms_lossscale.diagnosis.arguments import with_progress_bar
from ms_lossscale.diagnosis.cell_watch import CellWatch, as_array, cell_names, is_float
from ms_lossscale.diagnosis.distribution import FLOAT16
from ms_lossscale.diagnosis.gradient_report import LOSS_SCALES
from ms_lossscale.diagnosis.locate_overflow import OverflowTrace, Search
from ms_lossscale.diagnosis.replay import LossAndGrads, running
from ms_lossscale.diagnosis.source_line import LineWatch

# Exponents of the scales at which the search for the largest one stops to look.
_STEPS = (8, 16, 24, 32, 64, int(math.log2(LOSS_SCALES[-1])))
_SMALLEST_NORMAL = 2.0**FLOAT16.min_exponent
# Dropout draws anew, and float16 rounds: an output is lost if fewer are left.
_KEPT = 0.01


class Found(NamedTuple):
    """
    Where something overflows first.

    - **trace** (OverflowTrace) - What :func:`locate_overflow` says of it.
    - **cell** (str) - The cell's name.
    - **suspect** (str) - The cell whose computation it comes from.
    - **order** (list[str]) - The cells in the order in which the forward left them.
    - **at** (tuple[int, int]) - The number of the batch, and of the network.
    """

    trace: OverflowTrace
    cell: str
    suspect: str
    order: list
    at: tuple


class Trials:
    """
    Runs batches forward and backward, in PyNative mode within `replay`, with some cells in float32. Cells go by names,
    as in `network.cells_and_names()`, those of several networks after `networks[i]`; a cell in two places by the first.

    Args:
        replayed (list[LossAndGrads]): What `replay` gives.
        batches (list[tuple]): The batches.
        smallest_scale (float): No scale below it is of use.

    Attributes:
        cells (dict[str, Cell]): All cells.
        runs (int): How often the batches were run, forward and backward, until something overflowed.
        counts_lost (bool): Whether a cell with a lost output, see `first_lost`, is as bad as one that overflows.
    """

    def __init__(self, owner, replayed, batches, smallest_scale):
        self._owner = owner
        self._replayed = replayed
        self.smallest_scale = smallest_scale
        # What overflowed last comes first: most trials end there.
        self._work = list(itertools.product(range(len(batches)), range(len(replayed))))
        self._batches = batches
        self.cells, self._names = {}, {}
        for each in replayed:
            for name, cell in each.part.network.cells_and_names():
                if id(cell) not in self._names:
                    name = self._names[id(cell)] = ".".join(filter(None, (each.part.prefix, name)))
                    self.cells[name] = cell
        self._inside = {name: {id(each) for _, each in cell.cells_and_names()} for name, cell in self.cells.items()}
        self.roots = list(dict.fromkeys(self._names[id(each.part.network)] for each in replayed))
        self._state = [
            each
            for part in (each.part for each in replayed)
            for each in (*part.network.get_parameters(), *part.network.buffers())
            if each is not None and is_float(each) and not each.requires_grad
        ]
        self._state = [each for each in self._state if _are_finite([each])]
        self._random_state = mindspore.get_rng_state()
        self._bar = iter(with_progress_bar(itertools.count(1), None, owner, "run"))
        self.runs = 0
        self.counts_lost = False
        self._known = {}
        # Of each batch, network and cell how many values are not small with all cells in float32.
        self._expected = None
        # Of each weight how many gradients are not zero then.
        self._nonzero = None
        # For the cells that are in float32 now: what is compiled for others is of no use.
        self._of_names = None

    def covers(self, names, name):
        """Whether a cell is one of these, or inside one."""
        return any(id(self.cells[name]) in self._inside[each] for each in names)

    def kind(self, name):
        """The class of a cell, as its author wrote it."""
        its_class = type(self.cells[name])
        return (its_class.__mro__[1] if is_rewritten(self.cells[name]) else its_class).__name__

    def inside(self, name):
        """The cells directly inside a cell."""
        return [self._names[id(each)] for each in self.cells[name].cells()]

    def around(self, name):
        """The cells directly around a cell."""
        return [each for each in self.cells if name in self.inside(each)]

    @contextlib.contextmanager
    def _run(self, names):
        self.runs = next(self._bar)
        if self._of_names != frozenset(names):
            self._of_names = frozenset(names)
            self._replayed = [LossAndGrads(self._owner, each.part, each.restore, False) for each in self._replayed]
        mindspore.set_rng_state(self._random_state)
        with in_float32(self.cells[name] for name in names):
            try:
                yield
            finally:
                self._replayed[0].restore()

    def are_finite(self, names, loss_scale=None):
        """Whether all batches are finite, forward and backward, with these cells in float32."""
        loss_scale = loss_scale or self.smallest_scale
        key = frozenset(names), loss_scale, self.counts_lost
        if key not in self._known:
            with self._run(names):
                self._known[key] = self._find_overflow(loss_scale, bool(names)) is None
            if self._known[key] and self.counts_lost:
                self._known[key] = self.first_lost(names) is None
        return self._known[key]

    def _find_overflow(self, loss_scale, may_fail):
        """The number, in `_work`, of the first that overflows; None if none does."""
        for i, (batch, number) in enumerate(self._work):
            try:
                with running(self._owner, f"batches[{batch}]"):
                    loss, grads = self._replayed[number].correct(loss_scale, self._batches[batch])
                is_finite = _are_finite([loss, *grads, *self._state])
            except RuntimeError:
                # Operators that take no two dtypes, say: not with these cells.
                if not may_fail:
                    raise
                forget_failed_calls()
                is_finite = False
            if not is_finite:
                self._work.insert(0, self._work.pop(i))
                return i
        return None

    def largest_scale(self, names, in_graph_mode):
        """The largest power of two at which all batches are finite, if they are at the smallest scale."""

        def are_finite(exponent):
            if in_graph_mode:
                return self.error_in_graph_mode(names, 2.0**exponent) is None
            return self.are_finite(names, 2.0**exponent)

        low, high = math.ceil(math.log2(self.smallest_scale)), _STEPS[-1] + 1
        for exponent in (each for each in _STEPS if each > low):
            if not are_finite(exponent):
                high = exponent
                break
            low = exponent
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if are_finite(middle) else (low, middle)
        return 2.0**low

    def look(self, names, loss_scale=None):
        """What overflows first with these cells in float32; None if nothing does."""
        with self._run(names):
            for batch, number in self._work:
                search = Search(self._replayed[number], loss_scale or self.smallest_scale)
                search.run(self._batches[batch])
                overflow = next((each for each in search.overflows if not each.held_by_dtype), None)
                if overflow is not None:
                    return self._found(search, overflow, (batch, number))
                written = next((each for each in self._state if not _are_finite([each])), None)
                if written is not None:
                    return self._found_written(search, written, (batch, number))
                self._replayed[0].restore()
        return self.first_lost(names) if self.counts_lost else None

    def _found_written(self, search, state, at):
        """What overflowed is only in what the forward wrote, BatchNorm's statistics say."""
        cell = self.owner((at[1], state.name))
        trace = OverflowTrace(True, self.smallest_scale, cell, "forward", state.name, "not finite")
        names = self._names_in(search.part)
        return Found(trace, cell, cell, list(dict.fromkeys(names[each] for each, _ in search.inputs)), at)

    def first_lost(self, names):
        """
        Where an output is lost first, None if none is: in float32 it has values that float16 holds, in float16 hardly
        one. It was divided by an infinity on the way: a norm does so whose squares overflow.
        """
        if self._expected is None:
            self._expected = self._sizeable(self.roots)
        counts = self._sizeable(names)
        for (at, cell), expected in self._expected.items():
            if counts.get((at, cell), 0) < _KEPT * expected:
                trace = OverflowTrace(True, self.smallest_scale, cell, "forward", "output", "zero")
                order = list(dict.fromkeys(each for _, each in counts))
                return Found(trace, cell, cell, order, at)
        return None

    def _sizeable(self, names):
        """Of each batch, network and cell how many values of its outputs are normal numbers in float16, or larger."""
        counts = {}
        with self._run(names):
            for at in sorted(self._work):
                part, of_part = self._replayed[at[1]].part, self._names_in(self._replayed[at[1]].part)

                def note(place, _, tensor, at=at, of_part=of_part):
                    key = at, of_part[place.cell]
                    counts[key] = counts.get(key, 0) + int((np.abs(as_array(tensor)) >= _SMALLEST_NORMAL).sum())

                with CellWatch(part.prefix, part.network, note, lambda *_: None).watching():
                    part.loss(*part.inputs(self._batches[at[0]]))
                self._replayed[0].restore()
        return counts

    def _found(self, search, overflow, at):
        names = self._names_in(search.part)
        cell = suspect = names[overflow.trace.cell]
        between = (
            any(each.non_finite for each in search.inputs_of(overflow))
            if overflow.trace.direction == "forward"
            else search.has_received(overflow)
        )
        if between:
            # No cell put it out: it was computed in the construct of the cell around.
            suspect = next(iter(self.around(suspect)), suspect)
        order = list(dict.fromkeys(names[cell] for cell, _ in search.inputs))
        return Found(search.explained(overflow), cell, suspect, order, at)

    def lost_gradients(self, names, loss_scale):
        """
        The weights, as numbers of their networks and names, of whose gradients float16 keeps less than half of what is
        not zero with all cells in float32.
        """
        if self._nonzero is None:
            self._nonzero = self._nonzero_gradients(self.roots, self.smallest_scale)
        kept = self._nonzero_gradients(names, loss_scale)
        return [key for key, expected in self._nonzero.items() if kept[key] < expected / 2]

    def _nonzero_gradients(self, names, loss_scale):
        """Of each weight how many gradients are finite and not zero."""
        counts = {}
        with self._run(names):
            for batch, number in self._work:
                _, grads = self._replayed[number].correct(loss_scale, self._batches[batch])
                for weight, grad in zip(self._replayed[number].part.weights, grads):
                    values, key = as_array(grad), (number, weight.name)
                    counts[key] = counts.get(key, 0) + int((np.isfinite(values) & (values != 0)).sum())
                self._replayed[0].restore()
        return counts

    def owner(self, weight):
        """The innermost cell that has a weight, given as `lost_gradients` gives it."""
        number, name = weight
        for _, cell in self._replayed[number].part.network.cells_and_names():
            if any(each.name == name for each in cell.get_parameters(expand=False)):
                return self._names[id(cell)]
        return self.roots[0]

    def line(self, found, names):
        """The line of the suspect's construct from which the overflow comes, as text; empty if that is not seen."""
        watch, (batch, number) = LineWatch(self.cells[found.suspect]), found.at
        with self._run(names), watch.watching():
            self._replayed[number].part.loss(*self._replayed[number].part.inputs(self._batches[batch]))
        return str(watch)

    def _names_in(self, part):
        watched = cell_names(part.prefix, part.network)
        return {watched[id(cell)]: self._names[id(cell)] for _, cell in part.network.cells_and_names()}

    def largest_values(self, names):
        """Of each cell the largest finite output, and the largest finite gradient of its inputs, in absolute value."""
        largest = {"forward": {}, "backward": {}}

        def note(direction, place, tensor):
            values = as_array(tensor)
            values = np.abs(values[np.isfinite(values)]).astype(np.float64)
            its = largest[direction]
            its[place.cell] = max(its.get(place.cell, 0.0), float(values.max(initial=0.0)))

        def on_output(place, _, tensor):
            note("forward", place, tensor)

        def on_gradient(place, tensor):
            note("backward", place, tensor)

        seen = {}
        with self._run(names):
            for batch, number in self._work:
                loss_and_grads = self._replayed[number]
                part = loss_and_grads.part
                with CellWatch(part.prefix, part.network, on_output, lambda *_: None, on_gradient).watching():
                    loss_and_grads.in_pynative(self.smallest_scale, self._batches[batch])
                self._replayed[0].restore()
                of_part = self._names_in(part)
                for direction, its in largest.items():
                    for cell, value in its.items():
                        key = direction, of_part[cell]
                        seen[key] = max(seen.get(key, 0.0), value)
                    its.clear()
        return seen

    def error_in_graph_mode(self, names, loss_scale=None):
        """Why the batches are not finite as graph mode compiles the networks with these cells; None if they are."""
        with self._run(names):
            for batch, number in self._work:
                try:
                    loss, grads = self._replayed[number].in_graph(
                        loss_scale or self.smallest_scale, self._batches[batch]
                    )
                except Exception as error:
                    forget_failed_calls()
                    return str(error)
                if not _are_finite([loss, *grads, *self._state]):
                    return f"batches[{batch}] is not finite"
        return None


def _are_finite(tensors):
    return all(np.isfinite(as_array(each)).all() for each in tensors)
