"""What a monitor reads of the steps of a training cell, and what it says of them."""

from collections import Counter
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import listed
from ms_lossscale._mindspore.cells import written_class
from ms_lossscale._output import LossScaleValues, counted
from ms_lossscale._values import as_array
from ms_lossscale.callbacks.records import Record

# What a sum says of each reason.
_PHRASES = {
    "condition": "by a condition",
    "loss": "with a loss that was not finite",
    "forward_state": "as what the forward wrote was not finite",
    "gradients": "with gradients that were not finite",
    "detector": "by the overflow detector alone",
}


class Snapshot(NamedTuple):
    """Copies of what the next step will change."""

    counters: dict[str, Tensor]
    loss_scales: list[Tensor]


class WatchedStep:
    """What a monitor knows of the steps under one overflow check, which may be that of one of several networks."""

    def __init__(self, step, network, of_cycles):
        self._transaction = step.transaction
        self._network = network
        # A step of the counters is a cycle of calls where gradients are accumulated, and a call elsewhere.
        self._of_cycles = of_cycles
        self.prefix = "" if network is None else f"network {network}: "
        conditions = ""
        if self._transaction.conditions is not None:
            asked = self._transaction.conditions.conditions
            conditions = " or ".join(written_class(condition.cell).__name__ for condition in asked)
        self._phrases = {**_PHRASES, "condition": f"by the condition {conditions}"}
        self._weights = [weight.name for weight in self._transaction.update.optimizers.parameters]
        counts = self._transaction.counters.as_dict()
        self._applied = counts["applied_steps"]
        self._skipped = counts["skipped_steps"]
        self._retries = counts.get("retries", 0)
        self._reasons = self._transaction.counters.skip_reasons.asnumpy().copy()
        self._scale = LossScaleValues(
            loss_scale.get_loss_scale() for loss_scale in self._transaction.scales.loss_scales
        )
        # The counters go on where an earlier training ended, the numbers of the lines begin anew.
        self._in_all = " in all" if self._applied + self._skipped else ""
        self._reasons_to_sum_up = Counter()
        # The inputs of the last call that overflowed, or, in an accumulation cycle, of the first that did; of the last
        # one, if a condition skips it.
        self.batch = None
        self._is_in_overflow = False

    def snapshot(self):
        """Copies on the device, for which the host does not wait."""
        counters = self._transaction.counters
        parameters = {
            "applied_steps": counters.applied_steps,
            "skipped_steps": counters.skipped_steps,
            "consecutive_skipped_steps": counters.consecutive_skipped_steps,
            "overflowed": counters.overflowed,
            "skip_reasons": counters.skip_reasons,
        }
        if counters.counts_retries:
            parameters["retries"] = counters.retries
        copies = {name: prim.deepcopy(parameter) for name, parameter in parameters.items()}
        return Snapshot(copies, [prim.deepcopy(scale.scale_value) for scale in self._transaction.scales.loss_scales])

    def has_decided(self):
        """Returns whether a step was applied or skipped since the last one that was read."""
        return self._transaction.counters.steps_made() != self._applied + self._skipped

    def read(self, step, outputs, batch, snapshot):
        """Returns the record of a step, given the cell's results, its inputs, and the snapshot after the step."""
        loss, overflow, loss_scale = self._outputs_of_network(outputs)
        counters = snapshot.counters
        applied = int(counters["applied_steps"])
        new_skips = int(counters["skipped_steps"]) - self._skipped
        new_retries = int(counters.get("retries", 0)) - self._retries
        next_scale = LossScaleValues(map(float, snapshot.loss_scales))
        # Only now, since waiting for the device may be interrupted; the step is then read again.
        self._applied = applied
        self._skipped += new_skips
        self._retries += new_retries
        self._tried_at = self._scale
        self._scale = next_scale
        if (overflow or new_skips) and not self._is_in_overflow:
            # A cycle that is flushed may be skipped although none of its calls overflowed.
            self.batch = batch
        self._is_in_overflow = overflow and not new_skips
        return Record(
            step=step,
            network=self._network or 0,
            loss=float(np.sum(loss)),
            loss_scale=LossScaleValues(np.atleast_1d(loss_scale).tolist()),
            skipped=new_skips,
            applied_steps=self._applied,
            skipped_steps=self._skipped,
            consecutive_skipped_steps=int(counters["consecutive_skipped_steps"]),
            next_loss_scale=self._scale,
            overflowed_parameters=" ".join(self._overflowed_weights(counters) if new_skips else ()),
            retries=new_retries,
            skip_reasons=" ".join(self._new_reasons(counters) if new_skips else ()),
        )

    def _outputs_of_network(self, outputs):
        """Returns the loss, whether the step overflowed, and the loss scale, in NumPy."""
        if self._network is None:
            return as_numpy(outputs[0]), as_numpy(outputs[1]), as_numpy(outputs[2])
        overflow, loss_scale, losses = (as_numpy(values)[self._network] for values in outputs[1:4])
        return losses, overflow, loss_scale

    def _overflowed_weights(self, counters):
        return [name for name, overflowed in zip(self._weights, counters["overflowed"].asnumpy()) if overflowed]

    def _new_reasons(self, counters):
        before = self._reasons
        self._reasons = counters["skip_reasons"].asnumpy().copy()
        added = dict(zip(_PHRASES, (self._reasons - before).tolist()))
        self._reasons_to_sum_up.update(added)
        return [reason for reason, count in added.items() if count]

    def line(self, record):
        """Returns what to print of a step that was retried or skipped; of many in a row, of fewer and fewer."""
        events = []
        if record.retries:
            failed = self._is_in_overflow or record.skip_reasons not in ("", "condition")
            tries = f"and in {counted(record.retries, 'retry', 'retries')} down to" if failed else "done again at"
            events.append(f"overflow at {self._tried_at.written()}, {tries} {record.loss_scale.written()}")
        in_a_row = record.consecutive_skipped_steps
        new_skips = range(in_a_row - record.skipped + 1, in_a_row + 1)
        if record.skipped and (in_a_row <= record.skipped or any(map(_is_milestone, new_skips))):
            events.append(self.skip(record))
        return events and self.prefix + ", ".join(events)

    def skip(self, record):
        """Says that a step was skipped, and why."""
        used = record.loss_scale.written()
        now = record.next_loss_scale.written()
        why = " and ".join(self._phrases[reason] for reason in record.skip_reasons.split())
        scale = f"loss scale {used} stays" if now == used else f"loss scale {used}, now {now}"
        text = f"{'cycle ' * self._of_cycles}skipped ({record.consecutive_skipped_steps} in a row) {why}, {scale}"
        names = record.overflowed_parameters.split()
        if not names:
            return text
        return f"{text}; not finite: {listed(names, 5)} ({len(names)} of {len(self._weights)} gradients)"

    def state(self, record):
        """Returns what to print of a step every so many steps."""
        events = [
            f"loss {record.loss:.6g}",
            f"loss scale {record.loss_scale.written()}",
            f"{self._counted(record.applied_steps)} applied",
            f"{record.skipped_steps} skipped",
        ]
        return f"{self.prefix}{', '.join(events)}{self._in_all}"

    def sum_up(self):
        """Says how many steps were skipped since this was called before, by reason; nothing if none was."""
        reasons = self._reasons_to_sum_up
        self._reasons_to_sum_up = Counter()
        told = [f"{reasons[reason]} {phrase}" for reason, phrase in self._phrases.items() if reasons[reason]]
        return told and f"{self.prefix}{self._counted(sum(reasons.values()))} skipped: {', '.join(told)}"

    def _counted(self, number):
        return counted(number, "cycle", "cycles") if self._of_cycles else number


def as_numpy(value):
    """Returns a Tensor or a number in NumPy."""
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value)


def _is_milestone(number):
    """Returns whether it is 1, 2, 3, 5, 10, 20, 50, 100 and so on."""
    return number == 3 or str(number).rstrip("0") in ("1", "2", "5")
