"""Trying batches with some of a network's cells in float32."""

import collections
import contextlib
import itertools
import math
from functools import cached_property, partial
from typing import NamedTuple

import mindspore
import numpy as np

from ms_lossscale._mindspore import forget_failed_calls, in_float32, is_rewritten, raise_what_failed
from ms_lossscale.diagnosis.arguments import join_names, with_progress_bar
from ms_lossscale.diagnosis.cell_watch import CellWatch, LineWatch, WatchError, are_finite, as_array, is_float
from ms_lossscale.diagnosis.distribution import SMALLEST_NORMAL
from ms_lossscale.diagnosis.gradient_report import LOSS_SCALES
from ms_lossscale.diagnosis.locate_overflow import OverflowTrace, Search
from ms_lossscale.diagnosis.replay import LossAndGrads, running

# Exponents of the scales at which the search for the largest one stops to look.
_STEPS = (8, 16, 24, 32, 64, int(math.log2(LOSS_SCALES[-1])))
# Dropout draws anew, and float16 rounds: an output is lost if fewer are left.
_KEPT = 0.01


class Found(NamedTuple):
    """Where something overflows first: the name of the cell, and of the one whose computation it comes from."""

    trace: OverflowTrace
    cell: str
    suspect: str
    # The cells in the order in which the forward left them.
    order: list
    # The numbers of the batch and of the network.
    at: tuple


class Trials:
    """
    Runs batches forward and backward, in PyNative mode within `replay`, with some cells in float32. Cells go by names,
    as in `network.cells_and_names()`, those of several networks after `networks[i]`; a cell in two places by the first.

    Attributes:
        smallest_scale (float): No scale below it is of use.
        cells (dict[str, Cell]): All cells.
        runs (int): How often the batches were run, forward and backward, until something overflowed.
        counts_lost (bool): Whether a cell with a lost output, see `first_lost`, is as bad as one that overflows.
    """

    def __init__(self, owner, replayed, batches, smallest_scale):
        self._owner = owner
        self._replayed = replayed
        self._batches = batches
        self.smallest_scale = smallest_scale
        # Numbers of a batch and of a network. What overflowed last comes first: most trials end there.
        self._work = list(itertools.product(range(len(batches)), range(len(replayed))))
        self.cells, self._names = {}, {}
        for part in (each.part for each in replayed):
            for name, cell in part.network.cells_and_names():
                if id(cell) not in self._names:
                    name = self._names[id(cell)] = join_names(part.prefix, name)
                    self.cells[name] = cell
        self._inside = {name: {id(each) for _, each in cell.cells_and_names()} for name, cell in self.cells.items()}
        self.roots = list(dict.fromkeys(self._names[id(each.part.network)] for each in replayed))
        # What the forward may write, by its cell and its name.
        self._state = {}
        for cell_name, cell in self.cells.items():
            state = dict(cell.named_buffers(cell_name, recurse=False))
            state.update({each.name: each for each in cell.get_parameters(expand=False) if not each.requires_grad})
            finite = {name: each for name, each in state.items() if is_float(each) and are_finite([each])}
            self._state.update({(cell_name, name): each for name, each in finite.items()})
        self._random_state = mindspore.get_rng_state()
        self._bar = iter(with_progress_bar(itertools.count(1), None, owner, "run"))
        self.runs = 0
        self.counts_lost = False
        self._known = {}
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
        """A context with these cells in float32, which gives each batch with the network that is to run on it."""
        self.runs = next(self._bar)
        if self._of_names != frozenset(names):
            self._of_names = frozenset(names)
            self._replayed = [LossAndGrads(self._owner, each.part, each.restore, False) for each in self._replayed]
        mindspore.set_rng_state(self._random_state)
        with in_float32(self.cells[name] for name in names):
            try:
                yield self._each()
            finally:
                self._replayed[0].restore()

    def _each(self):
        for batch, number in list(self._work):
            yield (batch, number), self._replayed[number], self._batches[batch]
            self._replayed[0].restore()

    def are_finite(self, names, loss_scale=None):
        """Whether all batches are finite, forward and backward, with these cells in float32."""
        loss_scale = loss_scale or self.smallest_scale
        key = frozenset(names), loss_scale, self.counts_lost
        if key not in self._known:
            self._known[key] = self._run_is_finite(names, loss_scale)
            if self._known[key] and self.counts_lost:
                self._known[key] = self.first_lost(names) is None
        return self._known[key]

    def _run_is_finite(self, names, loss_scale):
        with self._run(names) as runs:
            for at, loss_and_grads, batch in runs:
                computed = self._attempt(names, at, loss_and_grads.correct, loss_scale, batch)
                if computed is None or not self._all_finite(*computed):
                    self._work.remove(at)
                    self._work.insert(0, at)
                    return False
        return True

    def _all_finite(self, loss, grads):
        return are_finite([loss, *grads, *self._state.values()])

    def _attempt(self, names, at, compute, *args):
        """What it returns; None if it fails with these cells in float32: operators may take no two dtypes."""
        try:
            with running(self._owner, f"batches[{at[0]}]"):
                result = compute(*args)
                raise_what_failed()
                return result
        except RuntimeError as error:
            if not names or isinstance(error.__cause__, WatchError):
                raise
            forget_failed_calls()
            return None

    def error_in_graph_mode(self, names, loss_scale=None):
        """Why the batches are not finite as graph mode compiles the networks with these cells; None if they are."""
        with self._run(names) as runs:
            for at, loss_and_grads, batch in runs:
                try:
                    loss, grads = loss_and_grads.in_graph(loss_scale or self.smallest_scale, batch)
                except Exception as error:
                    forget_failed_calls()
                    return str(error)
                if not self._all_finite(loss, grads):
                    return f"batches[{at[0]}] is not finite"
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
        with self._run(names) as runs:
            for at, loss_and_grads, batch in runs:
                search = Search(loss_and_grads, loss_scale or self.smallest_scale)
                is_refused = self._attempt(names, at, search.run, batch) is None
                of_part = self._names_in(search.part)
                order = list(dict.fromkeys(of_part[cell] for cell, _ in search.inputs))
                overflow = next((each for each in search.overflows if not each.held_by_dtype), None)
                if overflow is not None:
                    cell = suspect = of_part[overflow.trace.cell]
                    if search.came_in(overflow):
                        # It was computed in the construct of the cell around.
                        suspect = next(iter(self.around(cell)), cell)
                    return Found(search.explained(overflow), cell, suspect, order, at)
                if is_refused:
                    last = order[-1] if order else self.roots[0]
                    cell = next(iter(self.around(last)), last)
                    return self._found_in(cell, "output", "refused: an operator takes no two dtypes", order, at)
                # Where what overflowed is only in what the forward wrote, BatchNorm's statistics say.
                for (cell, name), written in self._state.items():
                    if not are_finite([written]):
                        return self._found_in(cell, name, "not finite", order, at)
        return self.first_lost(names) if self.counts_lost else None

    def _found_in(self, cell, what, kind, order, at):
        trace = OverflowTrace(True, self.smallest_scale, cell, "forward", what, kind)
        return Found(trace, cell, cell, order, at)

    def _names_in(self, part):
        watched = part.cell_names()
        return {watched[id(cell)]: self._names[id(cell)] for _, cell in part.network.cells_and_names()}

    def first_lost(self, names):
        """
        Where an output is lost first, None if none is: in float32 it has values that float16 holds, in float16 hardly
        one. It was divided by an infinity on the way: a norm does so whose squares overflow.
        """
        counts = self._sizeable(names)
        for (at, cell), expected in self._sizeable_in_float32.items():
            if counts.get((at, cell), 0) < _KEPT * expected:
                return self._found_in(cell, "output", "zero", list(dict.fromkeys(each for _, each in counts)), at)
        return None

    @cached_property
    def _sizeable_in_float32(self):
        return self._sizeable(self.roots)

    def _sizeable(self, names):
        """Of each batch, network and cell how many values of its outputs are normal numbers in float16, or larger."""
        counts = collections.Counter()

        def count(at, cell, values):
            counts[at, cell] += int((values >= SMALLEST_NORMAL).sum())

        self._watch(names, count)
        return dict(sorted(counts.items(), key=lambda item: item[0][0]))

    def largest_values(self, names):
        """Of each cell the largest finite output, and the largest finite gradient of its inputs, in absolute value."""
        largest = collections.defaultdict(float)

        def compare(direction, _, cell, values):
            finite = values[np.isfinite(values)].astype(np.float64)
            largest[direction, cell] = max(largest[direction, cell], float(finite.max(initial=0.0)))

        self._watch(names, partial(compare, "forward"), partial(compare, "backward"))
        return largest

    def _watch(self, names, on_output, on_gradient=None):
        """Calls back with the numbers of a batch and a network, a cell, and the absolute values seen there."""
        with self._run(names) as runs:
            for at, loss_and_grads, batch in runs:
                part = loss_and_grads.part
                of_part = self._names_in(part)

                def call(back, place, tensor, _=(), at=at, of_part=of_part):
                    back(at, of_part[place.cell], np.abs(as_array(tensor)))

                watch_gradient = on_gradient and partial(call, on_gradient)
                with CellWatch(part, partial(call, on_output), on_gradient_out=watch_gradient).watching():
                    if on_gradient is None:
                        part.loss(*part.inputs(batch))
                    else:
                        loss_and_grads.in_pynative(self.smallest_scale, batch)

    def lost_gradients(self, names, loss_scale):
        """
        The names of the weights of whose gradients float16 keeps less than half of what is not zero with all cells in
        float32.
        """
        kept = self._nonzero_gradients(names, loss_scale)
        return [name for name, expected in self._nonzero_in_float32.items() if kept[name] < expected / 2]

    @cached_property
    def _nonzero_in_float32(self):
        return self._nonzero_gradients(self.roots, self.smallest_scale)

    def _nonzero_gradients(self, names, loss_scale):
        """Of each weight how many gradients are finite and not zero."""
        counts = collections.Counter()
        with self._run(names) as runs:
            for _, loss_and_grads, batch in runs:
                _, grads = loss_and_grads.correct(loss_scale, batch)
                for weight, grad in zip(loss_and_grads.part.weights, grads):
                    values = as_array(grad)
                    counts[weight.name] += int((np.isfinite(values) & (values != 0)).sum())
        return counts

    def owner(self, weight):
        """The innermost cell that has a weight of this name."""
        for name, cell in self.cells.items():
            if any(each.name == weight for each in cell.get_parameters(expand=False)):
                return name
        return self.roots[0]

    def line(self, found, names):
        """The line of the suspect's construct from which the overflow comes, as text; empty if that is not seen."""
        watch, (batch, number) = LineWatch(self.cells[found.suspect]), found.at
        part = self._replayed[number].part
        with self._run(names), watch.watching():
            self._attempt(names, found.at, part.loss, *part.inputs(self._batches[batch]))
        return str(watch)
