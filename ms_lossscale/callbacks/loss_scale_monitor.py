"""Shows what the loss scale does, and stops a training that only skips: a callback, also for hand-written loops."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from mindspore import Tensor
from mindspore.train import Callback, RunContext

from ms_lossscale import _gradients as gradients
from ms_lossscale._advice import on_skips
from ms_lossscale._arguments import StrPath, check_file, check_positive_int
from ms_lossscale._keywords import takes_positions
from ms_lossscale._mindspore.graphs import is_compiling, refuse_compiled
from ms_lossscale._values import as_array
from ms_lossscale._warn_user import warn_user
from ms_lossscale.callbacks.model_callbacks import training_cell
from ms_lossscale.callbacks.record_file import Record, RecordFile
from ms_lossscale.callbacks.watched_step import LoopMistakes, StepState, WatchedStep
from ms_lossscale.cells.manual_step import ManualStep
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.diagnosis.locate_overflow import every_scale_of
from ms_lossscale.saved_batch import save_batch


class _UnreadStep(NamedTuple):
    step: int
    # Loss, overflow and scale, of alternating networks the losses, too; of a loss that is no scalar its sum.
    outputs: tuple
    batch: Optional[tuple]
    snapshots: list[Callable[[], StepState]]


class LossScaleMonitor(Callback):
    """
    Prints the loss, the loss scale and the counters of a training cell every `every_n_steps` steps; with `clip_norm`
    also the global norm of the gradients at the last step, and when accumulating the mean loss of the last cycle. For
    every step that was skipped or retried, it prints why: a condition asked for it, the loss or what the forward wrote
    was not finite and the scale stays, or an overflow, with the new scale and the parameters whose gradients were not
    finite. At the end of an epoch it sums up how many steps were skipped, by the reasons of
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
            ``65536.0/4096.0``. An existing file is continued, one of version 0.4 with its twelve columns. With several
            ranks, give each rank a file of its own. Default: ``None`` .
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
        >>> Model(cell).train(1, batches, callbacks=[LossScaleMonitor(every_n_steps=2)], dataset_sink_mode=False)
        step 2: loss 0, loss scale 1024, 2 applied, 0 skipped
        step 3: skipped (1 in a row) with a loss that was not finite, loss scale 1024, now 512; not finite: weight...
        step 4: loss 0.81, loss scale 512, 3 applied, 1 skipped
        steps 1 to 4: 1 skipped: 1 with a loss that was not finite

        The same in a loop of your own, which goes on with the same cell:

        >>> monitor = LossScaleMonitor(every_n_steps=2)
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

    @takes_positions
    def __init__(
        self,
        *,
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
        self._csv = check_file(owner, "csv", csv)
        self._save_batch = check_file(owner, "save_batch", save_batch)
        self._unread: deque[_UnreadStep] = deque()
        self._last: Optional[_UnreadStep] = None
        self._summed_up = 0
        # How many steps there were in a loop that is watched, and its mistakes, None in Model, which makes none.
        self._steps: Optional[int] = None
        self._mistakes: Optional[LoopMistakes] = None

    def on_record(self, record: Record) -> None:
        """
        Is called for each step, with an :class:`AlternatingTrainOneStepCell` for each of its networks, some time after
        it. It does nothing, for a subclass to override.

        Args:
            record (NamedTuple): The row of the CSV file: the ints `step`, `network`, `skipped` (how many steps were
                skipped: 0 or 1), `applied_steps`, `skipped_steps`, `consecutive_skipped_steps` and `retries`; the float
                `loss`; `loss_scale` and `next_loss_scale`, tuples of floats, one for each loss scale of the step; and
                `overflowed_parameters` and `skip_reasons`, names with spaces in between; `grad_norm`, a tuple with the
                global norm, before clipping, of each network, None for one without `clip_norm` and instead of a tuple
                without any; the float `step_loss`, when accumulating the mean over the calls of the cycle that were not
                dropped, by weight if they have weights, None if a loss is not known; and the int `dropped_calls`, so
                far. In a call that ended no step, `grad_norm` and `step_loss` are None.
        """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks the training cell and the CSV file."""
        # With data sinking on Ascend and GPU, `train_network` is MindSpore's wrapper around it.
        self._begin(run_context.original_args().network)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Remembers the step, and from time to time reads and prints what was remembered."""
        params = run_context.original_args()
        self._remember(params.cur_step_num, params.net_outputs, getattr(params, "train_dataset_element", None))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Reads what was remembered, and what a callback has flushed, so that nothing is missing. Sums up."""
        self.after_epoch()

    # A callback after this one may have flushed at the end of the epoch.
    on_train_epoch_begin = on_train_end = on_train_epoch_end

    def __exit__(self, *error: Any) -> None:
        self._read()

    @contextlib.contextmanager
    def watching(self, cell: TrainingState) -> Iterator[None]:
        """
        A context for a training loop of your own. It does at its beginning and at its end what `Model` makes this
        callback do, also if the loop raises. Call :meth:`after_step` in it after each step. It warns if this was never
        called, or told of steps that the cell did not make.

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
            >>> monitor = LossScaleMonitor(every_n_steps=2)
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
        self._mistakes = LoopMistakes(cell)
        try:
            with self:
                yield
                self.after_epoch()
            if self._steps == 0:
                warn_user(
                    "For 'LossScaleMonitor', 'watching' has ended without a single 'after_step', so that nothing was "
                    "shown of its steps. Call monitor.after_step(*outputs) after each step."
                )
        finally:
            self._steps = None
            self._mistakes = None

    def after_step(self, *outputs: Any, inputs: Union[Tensor, tuple, None] = None) -> None:
        """
        Remembers a step of a loop of your own within :meth:`watching`, and from time to time reads and prints what was
        remembered. Call it after each call of a training cell with all that it returned,
        ``monitor.after_step(*outputs)`` , and with a :class:`ManualStep` after `end` with two values,
        ``monitor.after_step(loss, overflow)`` .

        Args:
            *outputs (Any): All that the training cell returned; with a ManualStep the loss, a Tensor or a number, and
                what `end` returned. A loss that has a `weight` must be divided by it, as a training cell's is.
            inputs (Union[Tensor, tuple[Tensor]], optional): The inputs of the call, for `save_batch`. Default:
                ``None`` .

        Raises:
            ValueError: If these are not all the values that a training cell returns, or the two of a ManualStep, in
                their order.
            RuntimeError: Outside :meth:`watching`, or if `max_consecutive_skips` steps in a row were skipped.
        """
        if is_compiling():
            return refuse_compiled("after_step", "Call it in Python, with what the compiled function returned.")
        if self._steps is None:
            raise RuntimeError("For 'LossScaleMonitor', call 'after_step()' within: with monitor.watching(cell).")
        outputs = self._cell._outputs_of_call("LossScaleMonitor.after_step", outputs)
        self._steps += 1
        self._remember(self._steps, outputs, inputs if isinstance(inputs, (tuple, list, type(None))) else (inputs,))

    def after_epoch(self) -> None:
        """
        Reads what was remembered within :meth:`watching`, and sums up. Call it after `flush()`: the cycle that this has
        ended then belongs to the last step, and not to the next one.

        Raises:
            RuntimeError: If `max_consecutive_skips` steps in a row were skipped.
        """
        self._read()
        if self._last is None:
            return
        step = self._last.step
        flushed = self._last._replace(snapshots=self._snapshots())
        if any(watched.has_flushed(snapshot) for watched, snapshot in zip(self._watched, flushed.snapshots)):
            self._unread.append(flushed)
            self._read()
        sums = list(filter(None, (watched.sum_up() for watched in self._watched)))
        if sums:
            print(f"{self._call}s {min(self._summed_up + 1, step)} to {step}: {'; '.join(sums)}", flush=True)
        self._summed_up = step

    def _begin(self, cell):
        self._cell = training_cell("LossScaleMonitor", cell)
        of_cycles = cell._settings[0].gradient_accumulation_steps > 1
        self._call = "call" if of_cycles else "step"
        if cell._each_decides:
            self._watched = [WatchedStep(step, i, f"network {i}", of_cycles) for i, step in enumerate(cell._steps)]
        else:
            self._watched = [WatchedStep(cell._steps[0], None, cell._step_name, of_cycles)]
        self._unread.clear()
        self._last = None
        self._summed_up = 0
        self._reported = 0
        self._file = None if self._csv is None else RecordFile(self._csv)

    def _remember(self, step, outputs, batch):
        outputs = (_without_shape(outputs[0]), *outputs[1 : 4 if self._cell._each_decides else 3])
        self._last = _UnreadStep(step, outputs, batch if self._max_skips else None, self._snapshots())
        self._unread.append(self._last)
        if self._max_skips or step % self._every_n_steps == 0:
            self._read()

    def _snapshots(self):
        return [watched.snapshots.take() for watched in self._watched]

    def _read(self):
        rows = []
        try:
            while self._unread:
                unread = self._unread[0]
                # Only this waits for the device. If it is interrupted, the step is read again.
                outputs = tuple(map(_as_numpy, unread.outputs))
                states = [snapshot() for snapshot in unread.snapshots]
                self._unread.popleft()
                records = [
                    watched.record(unread.step, outputs, unread.batch, state)
                    for watched, state in zip(self._watched, states)
                ]
                rows += records
                self._print(unread.step, records)
                for record in records:
                    self.on_record(record)
                for watched, record in zip(self._watched, records):
                    self._stop_if_it_only_skips(watched, record)
            if rows and self._mistakes is not None:
                self._mistakes.look(self._watched, f"{self._call} {rows[-1].step}")
        finally:
            # Even if waiting for the device was interrupted.
            if rows and self._file is not None:
                self._file.append(rows)

    def _print(self, step, records):
        watched_records = list(zip(self._watched, records))
        lines = [watched.line(record) for watched, record in watched_records]
        if step // self._every_n_steps > self._reported // self._every_n_steps:
            self._reported = step
            lines.append("; ".join(watched.state(record) for watched, record in watched_records))
        for line in filter(None, lines):
            print(f"{self._call} {step}: {line}", flush=True)

    def _stop_if_it_only_skips(self, watched, record):
        if self._max_skips and record.skipped and record.consecutive_skipped_steps >= self._max_skips:
            raise RuntimeError(
                f"For 'LossScaleMonitor', training was stopped at {self._call} {record.step}, since "
                f"max_consecutive_skips is {self._max_skips}: {watched.prefix}{watched.skip(record)}. "
                f"{self._advice(record, watched.batch)}{self._save(watched.batch)}"
            )

    def _advice(self, record, batch):
        """Says what to do about the steps that were skipped."""
        reason = record.skip_reasons.split()[-1]
        cause = every_scale_of(self._cell, batch) if reason == "gradients" and batch is not None else ""
        return cause or f"What to try: {on_skips(reason, isinstance(self._cell, ManualStep))}."

    def _save(self, batch):
        """Saves the batch. Returns a sentence about it."""
        if self._save_batch is None:
            return ""
        if batch is None:
            return " The batch is not known: pass after_step inputs=(x, y), say, or Model dataset_sink_mode=False."
        path = str(self._save_batch)
        try:
            are_arrays = save_batch(path, batch)
        except Exception as error:
            # It must not hide why the training stops.
            return f" The batch could not be saved: {error}"
        recipe = f"tuple(np.load({path!r}).values())" if are_arrays else f"locate_overflow(network, [{path!r}])"
        return f" The batch was saved: {recipe}."


def _without_shape(loss):
    """Returns the sum of a loss that is no scalar: it would stay in memory until it is read."""
    if isinstance(loss, Tensor):
        return loss if loss.size == 1 else gradients.sums((loss,))[0]
    return np.sum(loss)


def _as_numpy(value):
    """Returns a Tensor or a number in NumPy."""
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value)
