"""Tries batches with some of a network's cells in float32."""

import collections
import contextlib
import itertools
from functools import cached_property, partial
from typing import NamedTuple

import mindspore
import numpy as np

from ms_lossscale._mindspore import forget_failed_calls, in_float32, raise_what_failed
from ms_lossscale._powers_of_two import last_that_holds, powers_of_two
from ms_lossscale._values import are_finite, as_array, is_float
from ms_lossscale.diagnosis.arguments import join_names, kind_of, with_progress_bar
from ms_lossscale.diagnosis.cell_watch import CellWatch, LineWatch, WatchError
from ms_lossscale.diagnosis.distribution import SMALLEST_NORMAL
from ms_lossscale.diagnosis.gradient_report import LOSS_SCALES
from ms_lossscale.diagnosis.locate_overflow import OverflowTrace, Search, register_trace
from ms_lossscale.diagnosis.replay import LossAndGrads, running

# An output is lost if fewer are left; not 0, since dropout draws anew and float16 rounds.
_KEPT = 0.01


class FirstOverflow(NamedTuple):
    """What overflows first: the name of the cell, and of the suspect, the cell whose computation it comes from."""

    trace: OverflowTrace
    cell: str
    suspect: str
    # The numbers of the batch and of the network.
    at: tuple


class NotFinite(str):
    """Says which batch graph mode could compute, but not to finite values."""


class Trials:
    """
    Runs batches forward and backward, in PyNative mode within `replay`, with some cells in float32. Cells are named as
    in `network.cells_and_names()`, after `networks[i]` if there are several; a cell in two places has the first name.

    Attributes:
        smallest_scale (float): The smallest scale that is of use.
        cells (dict[str, Cell]): All cells.
        runs (int): How often batches were run, forward and backward, each time until something overflowed.
        counts_lost (bool): Whether a cell with a lost output, see `first_lost`, is as bad as one that overflows.
    """

    def __init__(self, owner, replayed, batches, smallest_scale, detector):
        self._owner = owner
        self._replayed = replayed
        self._batches = batches
        self.smallest_scale = smallest_scale
        # What reads an NPU's status register, if anything does.
        self._detector = detector
        # Numbers of a batch and a network. The pair that overflowed last comes first: most trials end there.
        self._work = list(itertools.product(range(len(batches)), range(len(replayed))))
        self.cells, self._names = {}, {}
        for part in (each.part for each in replayed):
            for name, cell in part.network.cells_and_names():
                if id(cell) not in self._names:
                    name = self._names[id(cell)] = join_names(part.prefix, name)
                    self.cells[name] = cell
        self._inside = {name: {id(each) for _, each in cell.cells_and_names()} for name, cell in self.cells.items()}
        self.roots = list(dict.fromkeys(self._names[id(each.part.network)] for each in replayed))
        # The state that the forward may write, by cell and name.
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
        # The cells for which it is compiled: code compiled for other cells can't be used.
        self._of_names = None

    def covers(self, names, name):
        """Returns whether a cell is one of these, or inside one."""
        return any(id(self.cells[name]) in self._inside[each] for each in names)

    def kind(self, name):
        """Returns the class of a cell, as its author wrote it."""
        return kind_of(self.cells[name])

    def inside(self, name):
        """Returns the cells directly inside a cell."""
        # `cells_and_names` leaves out what is false, such as an empty CellList.
        return [self._names[id(each)] for each in self.cells[name].cells() if id(each) in self._names]

    def around(self, name):
        """Returns the cells directly around a cell."""
        return [each for each in self.cells if name in self.inside(each)]

    @contextlib.contextmanager
    def _run(self, names):
        """A context with these cells in float32. It yields each batch with the network that is to run on it."""
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
        """Returns whether all batches are finite, forward and backward, with these cells in float32."""
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
        """Computes, or returns None if these cells in float32 make it fail: operators may refuse mixed dtypes."""
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
        """Returns why the batches are not finite in graph mode with these cells, None if they are."""
        with self._run(names) as runs:
            for at, loss_and_grads, batch in runs:
                try:
                    loss, grads = loss_and_grads.in_graph(loss_scale or self.smallest_scale, batch)
                except Exception as error:
                    forget_failed_calls()
                    return str(error)
                if not self._all_finite(loss, grads):
                    return NotFinite(f"batches[{at[0]}] is not finite")
        return None

    def largest_scale(self, names, in_graph_mode):
        """Returns the largest power of two at which all batches are finite, if they are at the smallest."""

        def are_finite(loss_scale):
            if in_graph_mode:
                return self.error_in_graph_mode(names, loss_scale) is None
            return self.are_finite(names, loss_scale)

        powers = powers_of_two(self.smallest_scale, LOSS_SCALES[-1])
        return last_that_holds(powers, are_finite) or self.smallest_scale

    def look(self, names, loss_scale=None):
        """Returns what overflows first with these cells in float32, None if nothing does."""
        with self._run(names) as runs:
            for at, loss_and_grads, batch in runs:
                search = Search(loss_and_grads, loss_scale or self.smallest_scale)
                is_refused = self._attempt(names, at, search.run, batch) is None
                of_part = self._names_in(search.part)
                overflow = next((each for each in search.overflows if not each.held_by_dtype), None)
                if overflow is not None:
                    cell = suspect = of_part[overflow.trace.cell]
                    if search.came_in(overflow):
                        # It was computed in the construct of the enclosing cell.
                        suspect = self._enclosing(cell)
                    return FirstOverflow(search.explained(overflow), cell, suspect, at)
                if is_refused:
                    last = next((of_part[cell] for cell, _ in reversed(search.inputs)), self.roots[0])
                    kind = "refused: an operator takes no two dtypes"
                    return self._found_in(self._enclosing(last), "output", kind, at)
                # The overflow may only be in what the forward wrote, such as BatchNorm's statistics.
                for (cell, name), written in self._state.items():
                    if not are_finite([written]):
                        return self._found_in(cell, name, "not finite", at)
        return self.first_lost(names) if self.counts_lost else None

    def _enclosing(self, name):
        return next(iter(self.around(name)), name)

    def _found_in(self, cell, what, kind, at):
        trace = OverflowTrace(True, self.smallest_scale, cell, "forward", what, kind)
        return FirstOverflow(trace, cell, cell, at)

    def _names_in(self, part):
        watched = part.cell_names()
        return {watched[id(cell)]: self._names[id(cell)] for _, cell in part.network.cells_and_names()}

    def in_register(self, names):
        """Returns the trace of where only an NPU's status register shows an overflow, None if it does not."""
        if self._detector is None:
            return None
        with self._run(names) as runs:
            traces = (register_trace(each, self._detector, self.smallest_scale, batch) for _, each, batch in runs)
            return next((trace for trace in traces if trace is not None), None)

    def first_lost(self, names):
        """
        Returns where an output is lost first, None if none is. In float32 it has values that float16 can hold, but in
        float16 hardly any: it was divided by an infinity, as by a norm whose squares overflow.
        """
        counts = self._sizeable(names)
        for (at, cell), expected in self._sizeable_in_float32.items():
            if counts.get((at, cell), 0) < _KEPT * expected:
                return self._found_in(cell, "output", "zero", at)
        return None

    @cached_property
    def _sizeable_in_float32(self):
        return self._sizeable(self.roots)

    def _sizeable(self, names):
        """Counts, for each batch, network and cell, the output values that are at least normal numbers in float16."""
        counts = collections.Counter()

        def count(at, cell, values):
            counts[at, cell] += int((values >= SMALLEST_NORMAL).sum())

        self._watch(names, count)
        return dict(sorted(counts.items(), key=lambda item: item[0][0]))

    def largest_values(self, names):
        """Returns for each cell the largest finite output and gradient of its inputs, in absolute value."""
        largest = collections.defaultdict(float)

        def compare(direction, _, cell, values):
            finite = values[np.isfinite(values)].astype(np.float64)
            largest[direction, cell] = max(largest[direction, cell], float(finite.max(initial=0.0)))

        self._watch(names, partial(compare, "forward"), partial(compare, "backward"))
        return largest

    def _watch(self, names, on_output, on_gradient=None):
        """Calls back with the numbers of batch and network, a cell, and the absolute values seen there."""
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
        Returns the names of weights for which float16 keeps less than half of the gradients that are not zero with all
        cells in float32.
        """
        kept = self._nonzero_gradients(names, loss_scale)
        return [name for name, expected in self._nonzero_in_float32.items() if kept[name] < expected / 2]

    @cached_property
    def _nonzero_in_float32(self):
        return self._nonzero_gradients(self.roots, self.smallest_scale)

    def unreached(self):
        """Returns the numbers of the optimizers all of whose gradients are zero with all cells in float32."""
        counts = self._nonzero_in_float32
        parts = [each.part for each in self._replayed]
        return [part.optimizer for part in parts if not any(counts[weight.name] for weight in part.weights)]

    def _nonzero_gradients(self, names, loss_scale):
        """Counts, for each weight, the gradients that are finite and not zero."""
        counts = collections.Counter()
        with self._run(names) as runs:
            for _, loss_and_grads, batch in runs:
                _, grads = loss_and_grads.correct(loss_scale, batch)
                for weight, grad in zip(loss_and_grads.part.weights, grads):
                    values = as_array(grad)
                    counts[weight.name] += int((np.isfinite(values) & (values != 0)).sum())
        return counts

    def owner(self, weight):
        """Returns the innermost cell that has a weight of this name."""
        for name, cell in self.cells.items():
            if any(each.name == weight for each in cell.get_parameters(expand=False)):
                return name
        return self.roots[0]

    def line(self, found, names):
        """Returns the line of the suspect's construct that overflows, as text; empty if it is not found."""
        watch, (batch, number) = LineWatch(self.cells[found.suspect]), found.at
        part = self._replayed[number].part
        with self._run(names), watch.watching():
            self._attempt(names, found.at, part.loss, *part.inputs(self._batches[batch]))
        return str(watch)
