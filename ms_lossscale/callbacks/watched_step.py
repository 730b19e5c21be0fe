"""What a monitor keeps and says of the steps of a training cell, and of a loop that passes on others."""

import functools
import itertools
import operator
from collections import Counter
from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import listed
from ms_lossscale._mindspore.cells import written_class
from ms_lossscale._warn_user import warn_user
from ms_lossscale._words import Values, counted, written_scales, written_values
from ms_lossscale.callbacks.record_file import Record
from ms_lossscale.step.counters import ENDS, EVENTS


class StepState(NamedTuple):
    """What a snapshot holds, on the host."""

    # The counts of a record, by its names.
    counts: dict[str, int]
    # How often each event has happened in this process.
    events: Counter
    # Whose gradients were not finite in the last step that was skipped.
    overflowed: np.ndarray
    loss_scales: Values
    # The global norms at the last check, one for each network; None if nothing is measured.
    norms: Optional[Values]
    # How many calls the present accumulation cycle has had.
    calls: int = 0
    # The mean loss of the last cycle, None if it is not known.
    mean_loss: Optional[float] = None
    # At which scales the call began that was retried last.
    retried_at: Values = Values()


class Snapshots:
    """Takes snapshots of a transaction by four operators, for which the host does not wait, and reads them."""

    def __init__(self, transaction):
        counters = transaction.counters
        self._counters = counters
        self._counts = {
            "applied_steps": counters.applied_steps,
            "skipped_steps": counters.skipped_steps,
            "consecutive_skipped_steps": counters.consecutive_skipped_steps,
        }
        measured = transaction.norms.measured()
        self._is_measured = [norm in measured for norm in transaction.norms.of_network]
        self._numbers = {
            "loss_scales": [loss_scale.scale_value for loss_scale in transaction.scales.loss_scales],
            "roots": [norm.root for norm in measured],
            "powers": [norm.power for norm in measured],
        }
        if counters.counts_dropped:
            self._counts["dropped_calls"] = counters.dropped_calls
        if counters.counts_retries:
            self._numbers["retried_at"] = list(transaction.scales.retried_call_began_at)
        cycle = transaction.cycle
        if cycle is not None:
            self._counts["calls"] = cycle.count.value
            self._counts["knows_mean"] = cycle.knows_last_mean
            self._numbers["mean_loss"] = [cycle.last_mean_loss]

    def take(self):
        """Copies what the next step will change, on the device. Returns a function that reads it, as a StepState."""
        counts = prim.stack(tuple(self._counts.values()))
        numbers = prim.stack(tuple(itertools.chain(*self._numbers.values())))
        copies = (counts, numbers, prim.deepcopy(self._counters.events), prim.deepcopy(self._counters.overflowed))
        return functools.partial(self._read, copies)

    def _read(self, copies):
        counts, numbers, events, overflowed = (copy.asnumpy() for copy in copies)
        counts = {"dropped_calls": 0, **dict(zip(self._counts, counts.tolist()))}
        values = iter(numbers.tolist())
        numbers = {name: Values(itertools.islice(values, len(its))) for name, its in self._numbers.items()}
        norms = map(operator.truediv, numbers.pop("roots"), numbers.pop("powers"))
        norms = Values(next(norms) if is_measured else None for is_measured in self._is_measured)
        (mean_loss,) = numbers.pop("mean_loss", (None,))
        return StepState(
            mean_loss=mean_loss if counts.pop("knows_mean", False) else None,
            calls=counts.pop("calls", 0),
            counts=counts,
            **numbers,
            events=Counter(dict(zip(EVENTS, events.tolist()))),
            overflowed=overflowed,
            norms=norms if any(self._is_measured) else None,
        )


# What a sum says of each reason.
_PHRASES = {
    "condition": "by a condition",
    "loss": "with a loss that was not finite",
    "forward_state": "as what the forward wrote was not finite",
    "gradients": "with gradients that were not finite",
    "detector": "by the overflow detector alone",
    "not_begun": "as 'end' came without 'begin'",
}


class WatchedStep:
    """What a monitor says of the steps under one overflow check, which may be that of one of several networks."""

    def __init__(self, step, network, name, of_cycles):
        transaction = step.transaction
        self._network = network
        # A step of the counters is a cycle of calls where gradients are accumulated, and a call elsewhere.
        self._of_cycles = of_cycles
        self._each_call_ends = not transaction.counters.tells_applied
        self.prefix = "" if name is None else f"{name}: "
        conditions = ""
        if transaction.conditions is not None:
            asked = transaction.conditions.conditions
            conditions = " or ".join(written_class(condition.cell).__name__ for condition in asked)
        self._phrases = {**_PHRASES, "condition": f"by the condition {conditions}"}
        self._weights = [weight.name for weight in transaction.update.optimizers.parameters]
        self.snapshots = Snapshots(transaction)
        # After the call that was read last, and what has happened since the one before.
        self._state = self.snapshots.take()()
        self._new = Counter()
        # Of the last step that ended.
        self._last_norm = None
        # The counters go on where an earlier training ended, the numbers of the lines begin anew.
        self._in_all = " in all" if any(self._state.counts.values()) else ""
        self._to_sum_up = Counter()
        # The inputs of the last call that overflowed, or, in an accumulation cycle, of the first that did; of the last
        # one, if a condition skips it.
        self.batch = None
        self._is_in_overflow = False
        # Says which step a loop has told wrong first: an overflow of one that was applied, or none of one skipped.
        self.mistake = ""

    def has_flushed(self, snapshot):
        """Reads whether a cycle has ended between the last reading and a snapshot."""
        new = snapshot().events - self._state.events
        return self._of_cycles and not new.keys().isdisjoint(ENDS)

    def record(self, step, outputs, batch, state):
        """Returns the record of a step, given what the cell returned, in NumPy, its inputs, and the state after it."""
        loss, overflow, loss_scale = self._outputs_of_network(outputs)
        new = state.events - self._state.events
        reasons = [reason for reason in self._phrases if new[reason]]
        # Of what is new, a loop may not have told; and a checkpoint may have changed the counters since this step.
        skipped = bool(reasons) and bool(overflow or state.counts["consecutive_skipped_steps"])
        has_ended = not new.keys().isdisjoint(ENDS) or (self._each_call_ends and not new["not_begun"])
        self._keep(state, new, overflow, skipped, batch)
        if overflow != skipped and not self._of_cycles and not self.mistake:
            told = f"step {step} came with an overflow of {overflow}, but was {'skipped' if skipped else 'applied'}"
            self.mistake = f"{self.prefix}{told}. Pass what the step returned, as it is"
        if has_ended:
            self._last_norm = state.norms
        overflowed = zip(self._weights, state.overflowed if skipped and reasons != ["not_begun"] else ())
        return Record(
            step=step,
            network=self._network or 0,
            loss=loss,
            loss_scale=Values(np.atleast_1d(loss_scale).tolist()),
            skipped=int(skipped),
            **state.counts,
            next_loss_scale=state.loss_scales,
            overflowed_parameters=" ".join(name for name, has_overflowed in overflowed if has_overflowed),
            retries=new["retried"],
            skip_reasons=" ".join(reasons if skipped else ()),
            grad_norm=state.norms if has_ended else None,
            step_loss=(state.mean_loss if self._of_cycles else loss) if has_ended else None,
        )

    def _keep(self, state, new, overflow, skipped, batch):
        """Keeps what the lines, the next record and a stop need of a step."""
        self._state = state
        self._new = new
        self._to_sum_up.update(new)
        # A cycle that is flushed may be skipped although none of its calls overflowed.
        if (overflow or skipped) and (state.calls == 1 or not self._is_in_overflow):
            self.batch = batch
        self._is_in_overflow = overflow and not skipped

    def _outputs_of_network(self, outputs):
        """Returns the loss, whether the step overflowed, and the loss scale."""
        loss, overflow, loss_scale = outputs[:3]
        if self._network is not None:
            overflow, loss_scale, loss = (values[self._network] for values in outputs[1:])
        return float(np.sum(loss)), bool(overflow), loss_scale

    def line(self, record):
        """Returns what to print of a step that was retried or skipped; of many in a row, of fewer and fewer."""
        events = []
        if record.retries:
            failed = self._is_in_overflow or self._new["dropped"] or record.skip_reasons not in ("", "condition")
            tries = f"and in {counted(record.retries, 'retry', 'retries')} down to" if failed else "done again at"
            events.append(
                f"overflow at {written_scales(self._state.retried_at)}, {tries} {written_scales(record.loss_scale)}"
            )
        if _passes_milestone(record.dropped_calls, self._new["dropped"]):
            events.append(f"dropped ({record.dropped_calls} in all), loss scale {written_scales(record.loss_scale)}")
        in_a_row = record.consecutive_skipped_steps
        skips = self._skips_in(self._new)
        if record.skipped and (in_a_row <= skips or _passes_milestone(in_a_row, skips)):
            events.append(self.skip(record))
        return events and self.prefix + ", ".join(events)

    def skip(self, record):
        """Says that a step was skipped, and why."""
        used = written_scales(record.loss_scale)
        now = written_scales(record.next_loss_scale)
        why = " and ".join(self._phrases[reason] for reason in record.skip_reasons.split())
        scale = f"loss scale {used} stays" if now == used else f"loss scale {used}, now {now}"
        what = "cycle skipped" if self._of_cycles and record.skip_reasons != "not_begun" else "skipped"
        text = f"{what} ({record.consecutive_skipped_steps} in a row) {why}, {scale}"
        names = record.overflowed_parameters.split()
        if not names:
            return text
        return f"{text}; not finite: {listed(names, 5)} ({len(names)} of {len(self._weights)} gradients)"

    def state(self, record):
        """Returns what to print of a step every so many steps."""
        events = [f"loss {record.loss:.6g}"]
        if self._state.mean_loss is not None:
            events.append(f"mean of the last cycle {self._state.mean_loss:.6g}")
        if self._last_norm is not None:
            events.append(f"gradient norm {written_values(self._last_norm)}")
        events.append(f"loss scale {written_scales(record.loss_scale)}")
        events.append(f"{self._counted(record.applied_steps)} applied")
        events.append(f"{record.skipped_steps} skipped")
        if record.dropped_calls:
            events.append(f"{counted(record.dropped_calls, 'call', 'calls')} dropped")
        return f"{self.prefix}{', '.join(events)}{self._in_all}"

    def sum_up(self):
        """Says how many steps were skipped since this was called before, by reason; nothing if none was."""
        new = self._to_sum_up
        self._to_sum_up = Counter()
        told = [f"{new[reason]} {phrase}" for reason, phrase in self._phrases.items() if new[reason]]
        sums = [f"{self._counted(self._skips_in(new))} skipped: {', '.join(told)}"] if told else []
        if new["dropped"]:
            sums.append(f"{counted(new['dropped'], 'call', 'calls')} dropped")
        return sums and self.prefix + ", and ".join(sums)

    def _skips_in(self, events):
        return sum(events[reason] for reason in self._phrases)

    def _counted(self, number):
        return counted(number, "cycle", "cycles") if self._of_cycles else number


def _passes_milestone(number, added):
    """Returns whether a number that has grown by `added` has reached 1, 2, 3, 5, 10, 20, 50, 100 and so on."""
    passed = range(number - added + 1, number + 1)
    return 3 in passed or any(str(its).rstrip("0") in ("1", "2", "5") for its in passed)


class LoopMistakes:
    """Warns once of a loop that tells a monitor of other steps than those of the cell that is watched."""

    def __init__(self, cell):
        self._cell = cell
        # None once the cell has made a step.
        self._traces_at_begin = self._traces()
        self._has_warned = False

    def _traces(self):
        """Returns numbers that change with each call of the cell."""
        events = sum(int(step.transaction.counters.events.asnumpy().sum()) for step in self._cell._steps)
        calls = [int(count.value.asnumpy()) for count in self._cell._cycle_counts()]
        return [self._cell.steps_made(), events, *calls]

    def look(self, watched_steps, last):
        """Warns if the cell made none of the calls that were read, up to `last`, or if one was told wrong."""
        wrong = next((watched.mistake for watched in watched_steps if watched.mistake), "")
        if self._traces_at_begin is not None and self._traces_at_begin == self._traces():
            wrong = (
                f"the {type(self._cell).__name__} that is watched made no step before {last}. Pass the cell that "
                f"makes the steps: with monitor.watching(cell)"
            )
        else:
            self._traces_at_begin = None
        if wrong and not self._has_warned:
            self._has_warned = True
            warn_user(f"For 'LossScaleMonitor.after_step', {wrong}.")
