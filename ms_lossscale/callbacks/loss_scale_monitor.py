"""Shows what the loss scale does, and stops a training that only skips: a callback, also for hand-written loops."""

import contextlib
import csv
import os
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from mindspore import Tensor
from mindspore.train import Callback, RunContext

from ms_lossscale import _gradients as gradients
from ms_lossscale._advice import ON_SKIPS
from ms_lossscale._arguments import StrPath, check_positive_int, describe, listed
from ms_lossscale._mindspore.cells import written_class
from ms_lossscale._output import LossScaleValues, counted
from ms_lossscale._values import as_array
from ms_lossscale.cells.training_state import TrainingState

# What a sum says of each reason.
_PHRASES = {
    "condition": "by a condition",
    "loss": "with a loss that was not finite",
    "forward_state": "as what the forward wrote was not finite",
    "gradients": "with gradients that were not finite",
    "detector": "by the overflow detector alone",
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


class LossScaleMonitor(Callback):
    """
    Prints the loss, the loss scale and the counters of a training cell every `every_n_steps` steps. For every step that
    was skipped or retried, it prints why: a condition asked for it, the loss or what the forward wrote was not finite
    and the scale stays, or an overflow, with the new scale and the parameters whose gradients were not finite. At the
    end of an epoch it sums up how many steps were skipped, by the reasons of
    :meth:`ScaledTrainOneStepCell.skip_reasons`. To do more with each step, override :meth:`on_record`.

    It is a callback of :class:`mindspore.train.Model`. In a loop of your own, around a training cell or a
    :class:`ManualStep`, it does the same with :meth:`watching` and :meth:`after_step`.

    Its lines count steps from the beginning of this training. Where gradients are accumulated, they count calls, and
    say how many cycles were applied and skipped. These counts go on after a resume: "in all". Of steps that are skipped
    in a row, it prints the 1st, 2nd, 3rd, 5th, 10th, 20th, 50th, 100th and so on. The CSV file has all of them.

    Values are read from the device every `every_n_steps` steps and at the end of an epoch, or in each step if
    `max_consecutive_skips` is set: the host then waits for each step before it begins the next one. With data sinking
    on Ascend and GPU, MindSpore calls callbacks less often, and without the batch. Skipped steps in between are then
    counted but not listed.

    A partial accumulation cycle that :class:`FlushAccumulation` ends belongs to the epoch's last step, in whichever
    order you pass the two callbacks. That step then has a second row in the CSV file.

    Args:
        every_n_steps (int): After how many steps a line is printed, in addition to the lines of skipped steps. Default:
            ``100`` .
        csv (str, optional): A file that gets a row for each step; with an :class:`AlternatingTrainOneStepCell`, a row
            for each of its networks. Several loss scales of one step are written as
            ``65536.0/4096.0``. An existing file of this kind is continued. With several ranks, give each rank a file of
            its own. Default: ``None`` .
        max_consecutive_skips (int, optional): Stops the training when this many steps in a row were skipped. Default:
            ``None`` .
        save_batch (str, optional): An ``.npz`` file for the inputs of the step that stopped the training, for
            `locate_overflow`. When accumulating, these are the inputs of the call at which the cycle overflowed.
            Default: ``None`` .

    Raises:
        TypeError: If an argument has a wrong type, or, when the training begins, if the cell is not one of this
            package.
        ValueError: If a number is below 1, the folder of a path does not exist, `csv` or `save_batch` is a folder,
            `csv` is a file of another kind, or `save_batch` is given without `max_consecutive_skips`.
        OSError: During the training, if the CSV file can't be written.
        RuntimeError: During the training, if `max_consecutive_skips` steps in a row were skipped.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import Model
        >>> from ms_lossscale import DynamicLossScale, LossScaleMonitor, ScaledTrainOneStepCell
        >>> network = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros")
        >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale(2.0**10))
        >>> data = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}
        >>> data["x"][5] = np.inf
        >>> batches = dataset.NumpySlicesDataset(data, shuffle=False).batch(2)
        >>> Model(cell).train(1, batches, callbacks=[LossScaleMonitor(2)], dataset_sink_mode=False)
        step 2: loss 0, loss scale 1024, 2 applied, 0 skipped
        step 3: skipped (1 in a row) with a loss that was not finite, loss scale 1024, now 512; not finite: weight...
        step 4: loss 0.81, loss scale 512, 3 applied, 1 skipped
        steps 1 to 4: 1 skipped: 1 with a loss that was not finite

        The same in a loop of your own, which goes on with the same cell:

        >>> monitor = LossScaleMonitor(2)
        >>> with monitor.watching(cell):
        ...     for x, y in batches.create_tuple_iterator():
        ...         outputs = cell(x, y)
        ...         monitor.after_step(*outputs)
        ...
        step 2: loss 0.00656101, loss scale 512, 5 applied, 1 skipped in all
        step 3: skipped (1 in a row) with a loss that was not finite, loss scale 512, now 256; not finite: weight...
        step 4: loss 0.643043, loss scale 256, 6 applied, 2 skipped in all
        steps 1 to 4: 1 skipped: 1 with a loss that was not finite
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        csv: Optional[StrPath] = None,
        max_consecutive_skips: Optional[int] = None,
        save_batch: Optional[StrPath] = None,
    ) -> None:
        super().__init__()
        owner = "LossScaleMonitor"
        self._every_n_steps = check_positive_int(owner, "every_n_steps", every_n_steps)
        self._max_skips = max_consecutive_skips
        if max_consecutive_skips is not None:
            check_positive_int(owner, "max_consecutive_skips", max_consecutive_skips)
        elif save_batch is not None:
            raise ValueError(f"For '{owner}', 'save_batch' is {save_batch!r}, but needs 'max_consecutive_skips'.")
        self._csv, self._save_batch = _checked_file("csv", csv), _checked_file("save_batch", save_batch)
        self._unread: deque[tuple] = deque()
        self._last: Optional[tuple] = None
        # How many steps there were in a loop that is watched, None in Model.
        self._steps: Optional[int] = None

    def on_record(self, record: Record) -> None:
        """
        Is called for each step, with an :class:`AlternatingTrainOneStepCell` for each of its networks, some time after
        it. It does nothing, for a subclass to override.

        Args:
            record (NamedTuple): The row of the CSV file: the ints `step`, `network`, `skipped` (how many steps were
                skipped: 0 or 1), `applied_steps`, `skipped_steps`, `consecutive_skipped_steps` and `retries`; the float
                `loss`; `loss_scale` and `next_loss_scale`, tuples of floats, one for each loss scale of the step; and
                `overflowed_parameters` and `skip_reasons`, names with spaces in between.
        """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks the training cell and the CSV file."""
        self._begin(run_context.original_args().train_network)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Remembers the step, and from time to time reads and prints what was remembered."""
        params = run_context.original_args()
        self._remember(params.cur_step_num, params.net_outputs, getattr(params, "train_dataset_element", None))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Reads what was remembered, and what a callback has flushed, so that nothing is missing. Sums up."""
        self._end_epoch()

    # A callback after this one may have flushed at the end of the epoch.
    on_train_epoch_begin = on_train_end = on_train_epoch_end

    def __exit__(self, *error: Any) -> None:
        self._read()

    @contextlib.contextmanager
    def watching(self, cell: TrainingState) -> Iterator[None]:
        """
        A context for a training loop of your own. It does at its beginning and at its end what `Model` makes this
        callback do, also if the loop raises. Call :meth:`after_step` in it after each step.

        Args:
            cell (Union[ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell, ManualStep]):
                The training cell that the loop calls, or the :class:`ManualStep` that it uses, eagerly or in compiled
                code.

        Returns:
            Context manager.

        Raises:
            TypeError: If `cell` is something else.

        Examples:
            >>> import mindspore
            >>> import numpy as np
            >>> from mindspore import Tensor, nn
            >>> from ms_lossscale import DynamicLossScale, LossScaleMonitor, ManualStep
            >>> mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
            >>> network, loss_fn = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros"), nn.MSELoss()
            >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
            >>> step = ManualStep(network, optimizer, DynamicLossScale(2.0**10))
            >>> def forward(x, y):
            ...     loss = loss_fn(network(x), y)
            ...     return step.scale(loss), loss
            ...
            >>> value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)
            >>> x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
            >>> monitor = LossScaleMonitor(2)
            >>> with monitor.watching(step):
            ...     for _ in range(4):
            ...         (_, loss), grads = value_and_grad(*step.begin(x, y))
            ...         overflow = step.end(grads)
            ...         monitor.after_step(loss, overflow)
            ...
            step 2: loss 0, loss scale 1024, 2 applied, 0 skipped
            step 4: loss 0.6561, loss scale 1024, 4 applied, 0 skipped
        """
        self._begin(cell)
        self._steps = 0
        try:
            with self:
                yield
                self._end_epoch()
        finally:
            self._steps = None

    def after_step(self, *outputs: Any, inputs: Union[Tensor, tuple, None] = None) -> None:
        """
        Remembers a step of a loop of your own within :meth:`watching`, and from time to time reads and prints what was
        remembered. Call it after each call of a training cell with all that it returned,
        ``monitor.after_step(*outputs)`` , and with a :class:`ManualStep` after `end` with two values,
        ``monitor.after_step(loss, overflow)`` .

        Args:
            *outputs (Any): All that the training cell returned; with a ManualStep the loss, a Tensor or a number, and
                what `end` returned.
            inputs (Union[Tensor, tuple[Tensor]], optional): The inputs of the call, for `save_batch`. Default:
                ``None`` .

        Raises:
            ValueError: If these are not all the values that a training cell returns, or more than the two of a
                ManualStep.
            RuntimeError: Outside :meth:`watching`, or if `max_consecutive_skips` steps in a row were skipped.
        """
        if self._steps is None:
            raise RuntimeError("For 'LossScaleMonitor', call 'after_step()' within: with monitor.watching(cell).")
        outputs = self._cell._outputs_of_call("LossScaleMonitor.after_step", outputs)
        self._steps += 1
        self._remember(self._steps, outputs, (inputs,) if isinstance(inputs, Tensor) else inputs)

    def after_epoch(self) -> None:
        """
        Reads what was remembered within :meth:`watching`, and sums up. Call it after `flush()`: the cycle that this has
        ended then belongs to the last step, and not to the next one.

        Raises:
            RuntimeError: If `max_consecutive_skips` steps in a row were skipped.
        """
        self._end_epoch()

    def _begin(self, cell):
        if not isinstance(cell, TrainingState):
            raise TypeError(
                f"For 'LossScaleMonitor', the training cell must be one of ms_lossscale, or a ManualStep, but got "
                f"{describe(cell)}. Pass Model a ScaledTrainOneStepCell, say, without loss_fn and optimizer."
            )
        self._cell = cell
        of_cycles = cell._settings[0].gradient_accumulation_steps > 1
        self._call = "call" if of_cycles else "step"
        self._watched = [_Watched(its, i if cell.each_decides else None, of_cycles) for i, its in enumerate(cell.steps)]
        self._unread.clear()
        self._last, self._summed_up, self._reported = None, 0, 0
        if self._csv is not None:
            _begin_file(self._csv)

    def _remember(self, step, outputs, batch):
        # Copies on the device, for which the host does not wait.
        self._last = step, outputs, batch if self._max_skips else None
        self._unread.append((*self._last, [its.snapshot() for its in self._watched]))
        if self._max_skips or step % self._every_n_steps == 0:
            self._read()

    def _end_epoch(self):
        self._read()
        if self._last is None:
            return
        step = self._last[0]
        if any(its.has_decided() for its in self._watched):
            # A flush after the last call has ended its cycle.
            self._unread.append((*self._last, [its.snapshot() for its in self._watched]))
            self._read()
        sums = [text for text in (its.sum_up() for its in self._watched) if text]
        if sums:
            print(f"{self._call}s {min(self._summed_up + 1, step)} to {step}: {'; '.join(sums)}", flush=True)
        self._summed_up = step

    def _read(self):
        rows = []
        try:
            while self._unread:
                step, outputs, batch, snapshots = self._unread[0]
                records = [its.read(step, outputs, batch, copies) for its, copies in zip(self._watched, snapshots)]
                self._unread.popleft()
                rows += records
                self._print(step, records)
                for record in records:
                    self.on_record(record)
                for its, record in zip(self._watched, records):
                    self._stop_if_it_only_skips(its, record)
        finally:
            # Even if waiting for the device was interrupted.
            if rows and self._csv is not None:
                _append(self._csv, rows)

    def _print(self, step, records):
        lines = [its.line(record) for its, record in zip(self._watched, records)]
        if step // self._every_n_steps > self._reported // self._every_n_steps:
            self._reported = step
            lines.append("; ".join(its.state(record) for its, record in zip(self._watched, records)))
        for line in filter(None, lines):
            print(f"{self._call} {step}: {line}", flush=True)

    def _stop_if_it_only_skips(self, watched, record):
        if self._max_skips and record.skipped and record.consecutive_skipped_steps >= self._max_skips:
            raise RuntimeError(
                f"For 'LossScaleMonitor', training was stopped at {self._call} {record.step}, since "
                f"max_consecutive_skips is {self._max_skips}: {watched.prefix}{watched.skip(record)}. What to try: "
                f"{ON_SKIPS[record.skip_reasons.split()[-1]]}.{self._save(watched.batch)}"
            )

    def _save(self, batch):
        """Saves the batch. Returns a sentence about it."""
        if self._save_batch is None:
            return ""
        if batch is None:
            return " The batch is not known: pass after_step inputs=(x, y), say, or Model dataset_sink_mode=False."
        with open(self._save_batch, "wb") as file:
            np.savez(file, **{f"input_{i}": _array(its) for i, its in enumerate(batch)})
        return f" The batch was saved: tuple(np.load({str(self._save_batch)!r}).values())."


class _Watched:
    """What a monitor knows of the steps under one overflow check, which may be that of one of several networks."""

    def __init__(self, step, network, of_cycles):
        # A step of the counters is a cycle of calls where gradients are accumulated, and a call elsewhere.
        self._transaction, self._network, self._of_cycles = step.transaction, network, of_cycles
        self.prefix = "" if network is None else f"network {network}: "
        conditions = " or ".join(written_class(its.cell).__name__ for its in self._transaction.conditions)
        self._phrases = {**_PHRASES, "condition": f"by the condition {conditions}"}
        self._names = [weight.name for weight in self._transaction.optimizers.parameters]
        counts = self._transaction.counters.as_dict()
        self._applied, self._skipped = counts["applied_steps"], counts["skipped_steps"]
        self._retries = counts.get("retries", 0)
        self._reasons = self._transaction.counters.skip_reasons.asnumpy().copy()
        self._scale = LossScaleValues(its.get_loss_scale() for its in self._transaction.loss_scales)
        # The counters go on where an earlier training ended, the numbers of the lines begin anew.
        self._in_all = " in all" if self._applied + self._skipped else ""
        self._sum = Counter()
        # The inputs of the last call that overflowed, or, in an accumulation cycle, of the first that did; of the last
        # one, if a condition skips it.
        self.batch, self._is_in_overflow = None, False

    def snapshot(self):
        """Copies what the next step will change: counts, and whose gradients overflowed, and loss scales."""
        its = self._transaction.counters
        counts = (its.applied_steps, its.skipped_steps, its.consecutive_skipped_steps)
        counts += (its.retries, its.skip_reasons) if its.counts_retries else (its.skip_reasons,)
        scales = tuple(each.scale_value for each in self._transaction.loss_scales)
        return tuple(map(gradients.copy, (counts, (its.overflowed,), scales)))

    def has_decided(self):
        """Returns whether a step was applied or skipped since the last one that was read."""
        return self._transaction.counters.steps_made() != self._applied + self._skipped

    def read(self, step, outputs, batch, snapshot):
        """Returns the record of a step, given the cell's results, its inputs, and the snapshot after the step."""
        loss, overflow, loss_scale = (_array(outputs[i]) for i in (0 if self._network is None else 3, 1, 2))
        if self._network is not None:
            loss, overflow, loss_scale = (value[self._network] for value in (loss, overflow, loss_scale))
        (*counts, reasons), (overflowed,), scales = snapshot
        applied, skipped, in_a_row, retries = (*map(int, counts), 0)[:4]
        new_skips, new_retries = skipped - self._skipped, retries - self._retries
        self._applied, self._skipped, self._retries = applied, skipped, retries
        self._tried_at, self._scale = self._scale, LossScaleValues(map(float, scales))
        if (overflow or new_skips) and not self._is_in_overflow:
            # A cycle that is flushed may be skipped although none of its calls overflowed.
            self.batch = batch
        self._is_in_overflow = overflow and not new_skips
        names, why = (), {}
        if new_skips:
            names = [name for name, bad in zip(self._names, overflowed.asnumpy()) if bad]
            before, self._reasons = self._reasons, reasons.asnumpy().copy()
            why = {its: count for its, count in zip(_PHRASES, (self._reasons - before).tolist()) if count}
            self._sum.update(why)
        used = LossScaleValues(np.atleast_1d(loss_scale).tolist())
        what = step, self._network or 0, float(np.sum(loss)), used, new_skips, applied, skipped, in_a_row, self._scale
        return Record(*what, " ".join(names), new_retries, " ".join(why))

    def line(self, record):
        """Returns what to print of a step that was retried or skipped; of many in a row, of fewer and fewer."""
        what, number, used = [], record.consecutive_skipped_steps, record.loss_scale.written()
        if record.retries:
            failed = self._is_in_overflow or record.skip_reasons not in ("", "condition")
            tries = f"and in {counted(record.retries, 'retry', 'retries')} down to" if failed else "done again at"
            what.append(f"overflow at {self._tried_at.written()}, {tries} {used}")
        new = range(number - record.skipped + 1, number + 1)
        if record.skipped and (number <= record.skipped or any(map(_is_milestone, new))):
            what.append(self.skip(record))
        return what and self.prefix + ", ".join(what)

    def skip(self, record):
        """Says that a step was skipped, and why."""
        used, now = record.loss_scale.written(), record.next_loss_scale.written()
        why = " and ".join(self._phrases[reason] for reason in record.skip_reasons.split())
        scale = f"loss scale {used} stays" if now == used else f"loss scale {used}, now {now}"
        text = f"{'cycle ' * self._of_cycles}skipped ({record.consecutive_skipped_steps} in a row) {why}, {scale}"
        bad = record.overflowed_parameters.split()
        return f"{text}; not finite: {listed(bad, 5)} ({len(bad)} of {len(self._names)} gradients)" if bad else text

    def state(self, record):
        """Returns what to print of a step every so many steps."""
        scale, applied = record.loss_scale.written(), self._counted(record.applied_steps)
        text = f"loss {record.loss:.6g}, loss scale {scale}, {applied} applied, {record.skipped_steps} skipped"
        return f"{self.prefix}{text}{self._in_all}"

    def sum_up(self):
        """Says how many steps were skipped since this was called before, by reason; nothing if none was."""
        reasons, self._sum = self._sum, Counter()
        told = [f"{reasons[reason]} {phrase}" for reason, phrase in self._phrases.items() if reasons[reason]]
        return told and f"{self.prefix}{self._counted(sum(reasons.values()))} skipped: {', '.join(told)}"

    def _counted(self, number):
        return counted(number, "cycle", "cycles") if self._of_cycles else number


def _is_milestone(number):
    """Returns whether it is 1, 2, 3, 5, 10, 20, 50, 100 and so on."""
    return number == 3 or str(number).rstrip("0") in ("1", "2", "5")


def _array(value):
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value)


def _checked_file(name, value):
    """Raises unless it is None or the path of a file, in an existing folder. Returns a Path or None."""
    if value is None:
        return None
    is_path = isinstance(value, (str, os.PathLike))
    if not is_path or Path(value).is_dir() or not Path(value).parent.is_dir():
        what = f"the argument '{name}' must be a file in a folder that exists, or None, but got {describe(value)}"
        raise (ValueError if is_path else TypeError)(f"For 'LossScaleMonitor', {what}.")
    return Path(value)


def _begin_file(path):
    """Begins a CSV file, or makes sure that an existing one can be continued."""
    # A file that is not regular, such as /dev/null, has nothing to continue.
    before = path.read_bytes() if path.is_file() else b""
    whole = before[: before.rfind(b"\n") + 1]
    if whole and whole.splitlines()[0].decode(errors="replace") != ",".join(Record._fields):
        raise ValueError(
            f"For 'LossScaleMonitor', the argument 'csv' is {str(path)!r}, which has other columns than "
            f"{', '.join(Record._fields)}. Give the name of a new file, or of one of an earlier run."
        )
    if len(whole) < len(before):
        # A run that was killed has left an incomplete line.
        path.write_bytes(whole)
    if not whole:
        _append(path, [Record._fields])


def _append(path, rows):
    with open(path, "a", newline="") as file:
        csv.writer(file).writerows(rows)
