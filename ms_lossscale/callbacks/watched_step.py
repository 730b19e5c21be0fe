"""What a monitor knows of the steps of a training cell, what it says of them, and of a loop that passes on others."""

from collections import Counter

import numpy as np

from ms_lossscale._arguments import listed
from ms_lossscale._mindspore.cells import written_class
from ms_lossscale._output import Values, counted, warn_user, written_scales, written_values
from ms_lossscale.callbacks.records import Record, Snapshots


class MeanLoss:
    """
    The mean over the calls of a cycle that a monitor is told of, by weight if their losses have weights. Dropped calls
    are not in it.
    """

    def __init__(self):
        # The losses and the weights, one for each network, of each call of the present cycle; None of dropped ones.
        self._calls = []

    @np.errstate(invalid="ignore")  # The weight of a skipped step may be infinite.
    def add(self, losses, before, after):
        """Adds a call, given the states before and after it."""
        is_dropped = after.dropped_calls > before.dropped_calls
        self._calls.append(None if is_dropped else (losses, _weights(losses, before, after)))

    @np.errstate(invalid="ignore")
    def end(self, before, after):
        """Returns the mean of a cycle that ended between the states; None if none did, or all calls were dropped."""
        # What is no more of the present cycle is of the one that ended, or `discard` has dropped it.
        count = max(0, len(self._calls) - after.calls)
        kept = [call for call in self._calls[:count] if call is not None]
        self._calls = self._calls[count:]
        if after.steps == before.steps or not kept:
            return None
        losses, weights = map(np.array, zip(*kept))
        return float(np.sum(np.sum(losses * _or_one(weights), axis=0) / _or_one(weights.sum(axis=0))))


def _weights(losses, before, after):
    """Returns the weights of a call's losses."""
    if after.weights is None:
        return np.ones(len(losses))
    if after.calls == 0:
        weights = after.weights_of_last_cycle - before.weights
    elif after.calls == 1:
        weights = after.weights
    else:
        weights = after.weights - before.weights
    # A ManualStep has one loss for all networks.
    return weights[: len(losses)]


def _or_one(weights):
    """Returns 1 in the place of 0: the loss of a call without weight is the sum itself."""
    return np.where(weights > 0, weights, 1.0)


# What a sum says of each reason. All but the last are those of `skip_reasons` in their order, and that is what remains.
_PHRASES = {
    "condition": "by a condition",
    "loss": "with a loss that was not finite",
    "forward_state": "as what the forward wrote was not finite",
    "gradients": "with gradients that were not finite",
    "detector": "by the overflow detector alone",
    "not_begun": "as 'end' came without 'begin'",
}


class WatchedStep:
    """What a monitor knows of the steps under one overflow check, which may be that of one of several networks."""

    def __init__(self, step, network, name, of_cycles):
        transaction = step.transaction
        self._counters = transaction.counters
        self._network = network
        # A step of the counters is a cycle of calls where gradients are accumulated, and a call elsewhere.
        self._of_cycles = of_cycles
        self.prefix = "" if name is None else f"{name}: "
        conditions = ""
        if transaction.conditions is not None:
            asked = transaction.conditions.conditions
            conditions = " or ".join(written_class(condition.cell).__name__ for condition in asked)
        self._phrases = {**_PHRASES, "condition": f"by the condition {conditions}"}
        self._weights = [weight.name for weight in transaction.update.optimizers.parameters]
        self.snapshots = Snapshots(transaction)
        # After the call that was read last, and after the one before.
        self._state = self.snapshots.read(self.snapshots.take())
        self._before = self._state
        self._mean_loss = MeanLoss()
        # Of the last step that ended.
        self._last_norm = None
        self._last_mean = None
        # The counters go on where an earlier training ended, the numbers of the lines begin anew.
        self._in_all = " in all" if self._state.steps else ""
        self._reasons_to_sum_up = Counter()
        self._drops_to_sum_up = 0
        # The inputs of the last call that overflowed, or, in an accumulation cycle, of the first that did; of the last
        # one, if a condition skips it.
        self.batch = None
        self._is_in_overflow = False
        self._was_told_of_overflow = False

    def has_decided(self):
        """Returns whether a step was applied or skipped since the last one that was read."""
        return self._counters.steps_made() != self._state.steps

    def has_moved(self):
        """Returns whether there was a call at the last reading."""
        return self._state.steps != self._before.steps or self._state.calls != self._before.calls

    def contradicts(self, record):
        """Returns whether a loop has told the opposite of what the cell counted for the step that was read last."""
        is_one_step = not self._of_cycles and self._state.steps - self._before.steps == 1
        return is_one_step and self._was_told_of_overflow != (record.skipped > 0)

    def record(self, step, outputs, is_call, batch, state):
        """
        Returns the record of a step, given what the cell returned, in NumPy, its inputs, and the state after it. One
        that is no call is of a cycle that was flushed after the last call, whose values it has.
        """
        loss, losses, overflow, loss_scale = self._outputs_of_network(outputs)
        before = self._state
        self._before = before
        self._state = state
        self._was_told_of_overflow = bool(overflow)
        new_skips = max(0, state.skipped_steps - before.skipped_steps)
        reasons = self._new_reasons()
        not_begun = reasons["not_begun"]
        self._reasons_to_sum_up.update(reasons)
        self._drops_to_sum_up += self._new_drops()
        if (overflow or new_skips) and not self._is_in_overflow:
            # A cycle that is flushed may be skipped although none of its calls overflowed.
            self.batch = batch
        self._is_in_overflow = overflow and not new_skips
        has_ended = state.steps - before.steps > not_begun
        step_loss = self._step_loss(loss, losses if is_call else None, has_ended, not_begun)
        grad_norm = Values(state.norms) if has_ended and state.norms else None
        if has_ended:
            self._last_norm = grad_norm
            self._last_mean = step_loss
        return Record(
            step=step,
            network=self._network or 0,
            loss=loss,
            loss_scale=Values(np.atleast_1d(loss_scale).tolist()),
            skipped=new_skips,
            applied_steps=state.applied_steps,
            skipped_steps=state.skipped_steps,
            consecutive_skipped_steps=state.consecutive_skipped_steps,
            next_loss_scale=state.loss_scales,
            overflowed_parameters=" ".join(self._overflowed_weights() if new_skips > not_begun else ()),
            retries=state.retries - before.retries,
            skip_reasons=" ".join(reasons),
            grad_norm=grad_norm,
            step_loss=step_loss,
            dropped_calls=state.dropped_calls,
        )

    def _outputs_of_network(self, outputs):
        """Returns the loss, the losses that it is the sum of, whether the step overflowed, and the loss scale."""
        if self._network is None:
            losses = outputs[3] if len(outputs) > 3 else np.atleast_1d(np.sum(outputs[0]))
            return float(np.sum(outputs[0])), losses, outputs[1], outputs[2]
        overflow, loss_scale, losses = (values[self._network] for values in outputs[1:4])
        return float(losses), np.atleast_1d(losses), overflow, loss_scale

    def _step_loss(self, loss, losses, has_ended, not_begun):
        """Returns the mean loss of the step that has ended, None if none has."""
        if not self._of_cycles:
            return loss if has_ended else None
        is_in_cycle = self._state.calls > 0 and not (not_begun and self._state.calls == self._before.calls)
        if losses is not None and (has_ended or is_in_cycle):
            self._mean_loss.add(losses, self._before, self._state)
        return self._mean_loss.end(self._before, self._state)

    def _overflowed_weights(self):
        return [name for name, overflowed in zip(self._weights, self._state.overflowed) if overflowed]

    def _new_reasons(self):
        """Returns for which reasons steps were skipped since the last reading, a Counter."""
        added = (self._state.skip_reasons - self._before.skip_reasons).tolist()
        added.append(self._state.skipped_steps - self._before.skipped_steps - sum(added))
        return Counter({reason: count for reason, count in zip(_PHRASES, added) if count > 0})

    def _new_drops(self):
        return self._state.dropped_calls - self._before.dropped_calls

    def line(self, record):
        """Returns what to print of a step that was retried or skipped; of many in a row, of fewer and fewer."""
        events = []
        if record.retries:
            failed = self._is_in_overflow or self._new_drops() or record.skip_reasons not in ("", "condition")
            tries = f"and in {counted(record.retries, 'retry', 'retries')} down to" if failed else "done again at"
            events.append(
                f"overflow at {written_scales(self._before.loss_scales)}, {tries} {written_scales(record.loss_scale)}"
            )
        if _passes_milestone(record.dropped_calls, self._new_drops()):
            events.append(f"dropped ({record.dropped_calls} in all), loss scale {written_scales(record.loss_scale)}")
        in_a_row = record.consecutive_skipped_steps
        if record.skipped and (in_a_row <= record.skipped or _passes_milestone(in_a_row, record.skipped)):
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
        if self._of_cycles and self._last_mean is not None:
            events.append(f"mean of the last cycle {self._last_mean:.6g}")
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
        reasons = self._reasons_to_sum_up
        drops = self._drops_to_sum_up
        self._reasons_to_sum_up = Counter()
        self._drops_to_sum_up = 0
        told = [f"{reasons[reason]} {phrase}" for reason, phrase in self._phrases.items() if reasons[reason]]
        sums = [f"{self._counted(sum(reasons.values()))} skipped: {', '.join(told)}"] if told else []
        if drops:
            sums.append(f"{counted(drops, 'call', 'calls')} dropped")
        return sums and self.prefix + ", and ".join(sums)

    def _counted(self, number):
        return counted(number, "cycle", "cycles") if self._of_cycles else number


def _passes_milestone(number, added):
    """Returns whether a number that has grown by `added` has reached 1, 2, 3, 5, 10, 20, 50, 100 and so on."""
    return any(map(_is_milestone, range(number - added + 1, number + 1)))


def _is_milestone(number):
    return number == 3 or str(number).rstrip("0") in ("1", "2", "5")


class LoopMistakes:
    """Warns once of a loop that tells a monitor of other steps than those of the cell that is watched."""

    def __init__(self, cell):
        self._cell = cell
        self._calls_made = self._count_calls()
        self._has_moved = False
        self._has_warned = False

    def _count_calls(self):
        """Returns numbers that change with each call of the cell."""
        return [self._cell.steps_made(), *(int(count.value.asnumpy()) for count in self._cell._cycle_counts())]

    def look_at(self, watched, record, is_call):
        """Looks at a record that was just read. Warns of an overflow that is the opposite of what was counted."""
        self._has_moved = self._has_moved or not is_call or watched.has_moved()
        if watched.contradicts(record):
            self._warn(
                f"{watched.prefix}step {record.step} came with an overflow of {not record.skipped}, but was "
                f"{'skipped' if record.skipped else 'applied'}. Pass what the step returned, as it is"
            )

    def end_reading(self, last):
        """Warns if the cell made none of the calls that were read, up to `last`."""
        if not self._has_moved:
            # Of alternating networks, none may have taken part.
            calls_made = self._count_calls()
            if calls_made == self._calls_made:
                self._warn(
                    f"the {type(self._cell).__name__} that is watched made no step before {last}. Pass the cell that "
                    f"makes the steps: with monitor.watching(cell)"
                )
            self._calls_made = calls_made
        self._has_moved = False

    def _warn(self, what):
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"For 'LossScaleMonitor.after_step', {what}.")
