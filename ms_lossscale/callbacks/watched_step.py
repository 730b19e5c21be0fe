"""What a monitor knows of a training cell's steps. It is read from copies, some time after the steps."""

import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np

from ms_lossscale import _gradients as gradients
from ms_lossscale._output import LossScaleValues, counted, written_scale
from ms_lossscale._values import as_array
from ms_lossscale.callbacks.unreached import Unreached
from ms_lossscale.cells.endless_skips import OTHER_SYMPTOMS, SkippedSeries
from ms_lossscale.cells.skip_reasons import (
    CONDITION,
    DETECTOR,
    FORWARD_STATE,
    GRADIENTS,
    LOSS,
    SkipReasons,
    described_conditions,
    who_told,
)

_MOST_NAMES = 5
# What a sum says of each reason.
_PHRASES = {
    CONDITION: "by a condition",
    LOSS: "with a loss that was not finite",
    FORWARD_STATE: "as what the forward wrote was not finite",
    GRADIENTS: "with gradients that were not finite",
    DETECTOR: "by the overflow detector alone",
}


class Record(NamedTuple):
    """One step, or one network's part of it: a row of the CSV file."""

    step: int
    network: int
    loss: float
    loss_scale: LossScaleValues
    skipped: int
    applied_steps: int
    skipped_steps: int
    consecutive_skipped_steps: int
    next_loss_scale: LossScaleValues
    overflowed_parameters: str
    retries: int
    skip_reasons: str


class Snapshot(NamedTuple):
    """Copies, in tuples, of what the next step will change; `retries` is empty if they are not counted."""

    counts: tuple
    reasons: tuple
    overflowed: tuple
    retries: tuple
    scales: tuple
    norms: tuple


class WatchedStep:
    """What a monitor knows of the steps under one overflow check, which may be that of one of several networks."""

    def __init__(self, step, network, is_one_of_several, reads_norms, accumulates):
        self._step = step
        # A step of the counters is a cycle of calls where gradients are accumulated, and a call elsewhere.
        self.call, self._called = ("call", "cycle") if accumulates else ("step", "step")
        self._of_cycle = "cycle " if accumulates else ""
        self._measures = step.update.clipping.measures() if reads_norms else []
        self._network = network
        self._is_one_of_several = is_one_of_several
        self.of_network = f" of network {network}" if is_one_of_several else ""
        self._names = [weight.name for weight in step.update.optimizers.parameters]
        counters = step.update.step_counters.as_dict()
        self._applied_steps = counters["applied_steps"]
        self._skipped_steps = counters["skipped_steps"]
        self.consecutive = counters["consecutive_skipped_steps"]
        self._retries = counters.get("retries", 0)
        self._reasons = SkipReasons(step)
        self._scale_before = LossScaleValues(loss_scale.get_loss_scale() for loss_scale in step.scaling.loss_scales)
        self._applied_before = self._applied_steps
        # The counters go on where an earlier training ended, the numbers of the lines begin anew.
        self._in_all = " in all" if self._applied_steps + self._skipped_steps else ""
        several = is_one_of_several or len(step.update.optimizers.optimizers) > 1
        self._unreached = Unreached(step, network if several else None)
        # Whether the step that was read last was skipped.
        self.has_skipped = False
        # The inputs of the last call that overflowed, or, in an accumulation cycle, of the first; of the last one, if
        # a condition skips it.
        self.batch = None
        self._is_in_overflow = False
        self._overflowed = []
        # Why the steps that were read last were skipped.
        self.why = {}
        # The same of all since the sum was told, the first call of these, and the last one.
        self._sum, self._first, self._last = Counter(), None, None
        # The steps that were skipped since the last applied one.
        self.series = SkippedSeries(step)
        # The numbers of the loss scales that it has warned of.
        self._warned = set()
        # Whether a line was printed for the present series of skips, and how many skips followed.
        self._is_printed = False
        self._unprinted = 0

    def snapshot(self):
        """Copies what the next step will change."""
        counters = self._step.update.step_counters
        counts = (counters.applied_steps, counters.skipped_steps, counters.consecutive_skipped_steps)
        retries = (counters.retries,) if counters.counts_retries else ()
        scales = tuple(loss_scale.scale_value for loss_scale in self._step.scaling.loss_scales)
        norms = tuple(part for measure in self._measures if measure is not None for part in measure.parts())
        reasons = (self._reasons.counts,)
        return Snapshot(*map(gradients.copy, (counts, reasons, (counters.overflowed,), retries, scales, norms)))

    def has_decided_since(self, snapshot):
        """Returns whether a step was applied or skipped since the last one that was read."""
        applied_steps, skipped_steps, _ = _ints(snapshot.counts)
        return applied_steps + skipped_steps != self._applied_steps + self._skipped_steps

    def read(self, step, outputs, snapshot, batch):
        """Returns the record of a step, given the cell's results, the snapshot after the step, and its inputs."""
        loss, overflow, loss_scale = (as_array(outputs[i]) for i in (3 if self._is_one_of_several else 0, 1, 2))
        if self._is_one_of_several:
            loss, overflow, loss_scale = (value[self._network] for value in (loss, overflow, loss_scale))
        self._has_decided = self.has_decided_since(snapshot)
        self._applied_steps, skipped_steps, self.consecutive = _ints(snapshot.counts)
        skipped, self._skipped_steps = skipped_steps - self._skipped_steps, skipped_steps
        retries_before, self._retries = self._retries, sum(_ints(snapshot.retries))
        scales = LossScaleValues(float(scale.asnumpy()) for scale in snapshot.scales)
        self._tried_first_at, self._scale_before = self._scale_before, scales
        loss_scale = LossScaleValues(np.atleast_1d(loss_scale).tolist())
        self.has_skipped = skipped > 0
        if (overflow or skipped) and not self._is_in_overflow:
            # A cycle that is flushed may be skipped although none of its calls overflowed.
            self.batch = batch
        self._is_in_overflow = overflow and not skipped
        if self.consecutive == 0:
            self.series = SkippedSeries(self._step)
            self._warned.clear()
        if self.consecutive <= skipped:
            # The present series, if any, began with this step.
            self._is_printed, self._unprinted = False, 0
        self.why = {}
        if skipped:
            self.why = self._reasons.since_last(snapshot.reasons[0])
            self._overflowed = [name for name, bad in zip(self._names, snapshot.overflowed[0].asnumpy()) if bad]
            self.series.add(step, self._overflowed, loss, loss_scale, self.why)
        self._sum.update(self.why)
        self._first, self._last = self._first or step, step
        return Record(
            step,
            self._network,
            float(np.sum(loss)),
            loss_scale,
            skipped,
            self._applied_steps,
            skipped_steps,
            self.consecutive,
            self._scale_before,
            " ".join(self._overflowed) if skipped else "",
            self._retries - retries_before,
            " ".join(self.why),
        )

    def scalars(self, record, snapshot):
        """Returns the numbers that a summary shows for a step, by their tags."""
        scalars = self._tagged("loss", [record.loss])
        scalars.update(self._tagged("loss_scale", record.loss_scale))
        scalars.update(self._tagged("skipped_steps", [record.skipped_steps]))
        if snapshot.retries:
            scalars.update(self._tagged("retries", [self._retries]))
        if self._has_decided:
            parts = iter(snapshot.norms)
            norms = [measure and measure.value_of(next(parts), next(parts)) for measure in self._measures]
            scalars.update(self._tagged("grad_norm", norms))
        return {tag: value for tag, value in scalars.items() if value is not None}

    def _tagged(self, name, values):
        if len(values) > 1:
            return {f"network_{i}/{name}": value for i, value in enumerate(values)}
        prefix = f"network_{self._network}/" if self._is_one_of_several else ""
        return {f"{prefix}{name}": value for value in values}

    def print_retry(self, record):
        """Prints a line for a call that was retried."""
        again = f"done again at {record.loss_scale.written()}"
        if self._is_in_overflow:
            again = f"{self._in_retries(record)}: its accumulation cycle will be skipped"
        print(
            f"{self.call} {record.step}: overflow{self.of_network} at {self._tried_first_at.written()}, {again}",
            flush=True,
        )

    def _in_retries(self, record):
        retries = counted(record.retries, "retry", "retries")
        return f"and in {retries} down to {record.loss_scale.written()}"

    def print_skip(self, record):
        """Prints a line for a skipped step, but fewer and fewer in a long series."""
        self._unprinted += record.skipped
        new = range(self.consecutive - record.skipped + 1, self.consecutive + 1)
        if self._is_printed and not any(map(_is_milestone, new)):
            return
        more = f", {self._unprinted} since the last line" if self._unprinted > 1 else ""
        in_a_row = f"({self.consecutive} in a row{more})"
        what = [self._what_happened(record, in_a_row), self.what_overflowed()]
        print(f"{self.call} {record.step}: {'; '.join(filter(None, what))}", flush=True)
        self._is_printed, self._unprinted = True, 0

    def _what_happened(self, record, in_a_row):
        used, now = record.loss_scale.written(), record.next_loss_scale.written()
        stays = f"loss scale {used} stays" if now == used else f"loss scale now {now}"
        skipped = f"{self._of_cycle}skipped"
        if set(self.why) == {CONDITION}:
            again = ""
            if record.retries:
                again = f"overflow{self.of_network} at {self._tried_first_at.written()}, done again at {used}, then "
            conditions = described_conditions(self._step)
            return f"{again}{skipped} by a condition{self.of_network}: {conditions} {in_a_row}, {stays}"
        if self._stands_still(record):
            what = f"the loss{self.of_network}"
            if LOSS not in self.why:
                what = f"what the forward{self.of_network} wrote"
            return f"{what} was not finite, {skipped} {in_a_row}, {stays}"
        counts = ""
        if record.retries:
            used = f"{self._tried_first_at.written()} {self._in_retries(record)}"
            counts = ", since the first attempt counts"
        return f"overflow{self.of_network} at loss scale {used}, {skipped} {in_a_row}, now {now}{counts}"

    def _stands_still(self, record):
        """Whether the loss scale has stayed where it was because no lower one mends what was not finite."""
        is_patient = not all(its.backoff_if_loss_not_finite for its in self._step.scaling.loss_scales)
        of_forward = self.why and set(self.why) <= {LOSS, FORWARD_STATE}
        return is_patient and of_forward and record.next_loss_scale == record.loss_scale and not record.retries

    def counts(self, record):
        """Returns how many steps were applied and skipped so far, as text."""
        applied = counted(record.applied_steps, "cycle", "cycles") if self._of_cycle else record.applied_steps
        return f"{applied} applied, {record.skipped_steps} skipped{self._in_all}"

    def last_were_skipped(self):
        """Says how many steps in a row were skipped."""
        if self.consecutive == 1:
            return f"the last {self._called}{self.of_network} was skipped"
        return f"the last {self.consecutive} {self._called}s{self.of_network} were skipped"

    def what_overflowed(self):
        """Names the parameters whose gradients were not finite in the last skipped step."""
        names = self._overflowed
        wrote = "what the forward wrote (see forward_state_names())"
        if names:
            shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
            and_wrote = f", and {wrote}" if FORWARD_STATE in self.why else ""
            return f"not finite: {shown} ({len(names)} of {len(self._names)} gradients){and_wrote}"
        if set(self.why) == {CONDITION}:
            return ""
        if LOSS in self.why:
            return "all gradients are finite, a loss is not"
        if FORWARD_STATE in self.why:
            return f"all gradients are finite, but not {wrote}"
        return f"all gradients are finite; {who_told(self._step)}"

    def sum_up(self):
        """
        Returns the first and the last call since this was called before, and says how many steps were skipped in them,
        by reason; nothing if none was.
        """
        calls, reasons = (self._first, self._last), self._sum
        self._sum, self._first = Counter(), None
        if not reasons:
            return calls, ""
        number = sum(reasons.values())
        skipped = f"{counted(number, 'cycle', 'cycles')} skipped" if self._of_cycle else f"{number} skipped"
        network = f"network {self._network}: " if self._is_one_of_several else ""
        told = (f"{reasons[reason]} {phrase}" for reason, phrase in _PHRASES.items() if reason in reasons)
        return calls, f"{network}{skipped}: {', '.join(told)}"

    def warn_of_unreached(self, record):
        """Warns, at the first report, of optimizers to whose weights no gradient flows."""
        remark = self._unreached.look(record.applied_steps - self._applied_before)
        if remark:
            warnings.warn(f"For 'LossScaleMonitor', {self.call} {record.step}: {remark}", RuntimeWarning, stacklevel=2)

    def warn_at_floor(self, record):
        """Warns, once until a step is applied, if the scale can't become smaller. Returns whether it did."""
        warned = len(self._warned)
        overflowed = self._step.overflowed_loss_scales(self._overflowed)
        scales = zip(self._step.scaling.loss_scales, record.loss_scale, overflowed)
        for i, (loss_scale, used, has_overflowed) in enumerate(scales):
            floor = loss_scale.min_loss_scale
            is_at_floor = floor is not None and used <= floor and self._asks_for_less(loss_scale)
            if is_at_floor and has_overflowed and i not in self._warned:
                self._warned.add(i)
                of_network = f" of network {i}" if len(self._step.scaling.loss_scales) > 1 else self.of_network
                warnings.warn(
                    f"The loss scale{of_network} is stuck at its floor, min_loss_scale="
                    f"{written_scale(floor)}: {self.call} {record.step} still overflowed; "
                    f"{self.what_it_means()}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return len(self._warned) > warned

    def _asks_for_less(self, loss_scale):
        """Whether the steps that were read last lower a loss scale, as far as it can fall."""
        waits = set() if loss_scale.backoff_if_loss_not_finite else {LOSS, FORWARD_STATE}
        return not set(self.why) <= {CONDITION, *waits}

    def what_it_means(self):
        """Says since when steps are skipped, what was not finite in them, and what to look at."""
        return (
            f"since {self.call} {self.series.since} all were skipped, and {self.series.what_was_not_finite()}. "
            f"{self.series.advice(has_trained=self._applied_steps > 0)} {OTHER_SYMPTOMS}"
        )


def _ints(tensors):
    return [int(tensor.asnumpy()) for tensor in tensors]


def _is_milestone(number):
    """Returns whether it is 1, 2, 3, 5, 10, 20, 50, 100 and so on."""
    return number == 3 or str(number).rstrip("0") in ("1", "2", "5")
