"""Shows what the loss scale does, and stops a training that only skips: a callback, also for hand-written loops."""

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from mindspore import Tensor
from mindspore.train import Callback, RunContext

from ms_lossscale._arguments import StrPath, check_number, check_positive_int, describe
from ms_lossscale._output import written_scale
from ms_lossscale.callbacks.files import CsvFile, Summary
from ms_lossscale.callbacks.kept_batches import KeptBatches, save_inputs
from ms_lossscale.callbacks.watched_step import Record, WatchedStep
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.diagnosis.underflow import UnderflowWatch

# The least number of steps between two looks at the weights, which read all of them.
_STEPS = 50


class LossScaleMonitor(Callback):
    """
    Prints the loss, the loss scale and the counters of a training cell. For every skipped step, it prints why it was
    skipped: a condition asked for it, the loss was not finite and the scale stays
    (``backoff_if_loss_not_finite=False``), or an overflow, with the new scale and the parameters whose gradients were
    not finite. At the end of an epoch it sums up how many steps were skipped, by the reasons of
    :meth:`ScaledTrainOneStepCell.skip_reasons`.

    It is a callback of :class:`mindspore.train.Model`. In a loop of your own, around a training cell or a
    :class:`ManualStep`, it does the same with :meth:`watching` and :meth:`after_step`.

    Its lines count steps from the beginning of this training. Where gradients are accumulated, they count calls, and
    say how many cycles were applied and skipped. These counts go on after a resume: "in all".

    If several steps in a row are skipped, it prints the 1st, 2nd, 3rd, 5th, 10th, 20th, 50th, 100th and so on. The CSV
    file has all of them.

    Values are read from the device every `every_n_steps` steps, or in each step if `max_consecutive_skips` or
    `save_batches` is set: the host then waits for each step before it begins the next one. With data sinking on Ascend
    and GPU, MindSpore calls callbacks less often, and without the batch. Skipped steps in between are then counted but
    not listed.

    The first line comes with a `RuntimeWarning` if an optimizer trains nothing: its gradients are exactly zero where
    `clip_norm` measures their norm, or otherwise none of its weights has changed in 3 steps or more. In a GAN, the
    optimizers may be in the wrong order.

    One `RuntimeWarning` names weights that are infinite or NaN although steps are applied. It looks at them every 50
    steps at most, and at the end.

    A partial accumulation cycle that :class:`FlushAccumulation` ends belongs to the epoch's last step, in whichever
    order you pass the two callbacks. That step then has a second row in the CSV file.

    If a CSV or event file or a batch can't be written during the training, because the disk is full for example, the
    training goes on. One `RuntimeWarning` names the file, or the folder, and the error. Nothing more is written there
    before the next training begins, and the CSV file holds whole rows. MindSpore only logs errors of its own event
    files.

    Args:
        every_n_steps (int): After how many steps a line is printed, in addition to the lines of skipped steps. Default:
            ``100`` .
        csv (str, optional): A file that gets a row for each step; with an :class:`AlternatingTrainOneStepCell`, a row
            for each of its networks. Several loss scales of one step are written as
            ``65536.0/4096.0``. The last column, `skip_reasons`, has the reason of a step that was skipped, as in
            :meth:`ScaledTrainOneStepCell.skip_reasons`; of several skipped steps, all their reasons. An existing file
            of this kind is continued; one of an earlier version gets this column, empty so far. Default: ``None`` .
        max_consecutive_skips (int, optional): Stops the training when this many steps in a row were skipped. Default:
            ``None`` , which only warns when a :class:`DynamicLossScale` has fallen to its `min_loss_scale` and steps
            are still skipped.
        save_batch (str, optional): An ``.npz`` file for the inputs of the step that stopped the training, for
            `locate_overflow`. When accumulating, these are the inputs of the cycle's first call that overflowed.
            Default: ``None`` .
        summary_dir (str, optional): A folder for the scalars of each step: the loss, the loss scale, and the numbers of
            skipped steps and of retries so far. With `clip_norm`, calls that end a step add the gradients' norm. They
            are written for MindInsight by :class:`mindspore.SummaryRecord` and, if tensorboardX or PyTorch is
            installed, for TensorBoard. The folder is created if it does not exist. Default: ``None`` .
        save_batches (str, optional): A folder for the inputs of skipped steps, each in an ``.npz`` file whose name ends
            in the reason: ``000007_step_1200_gradients.npz``. ``tuple(np.load(path).values())`` are the inputs for
            `locate_overflow`, or, after a condition, for `profile_gradients`. Where gradients are accumulated, these
            are the inputs of the cycle's first call that overflowed; of its last call if a condition skipped it. What
            earlier trainings have left there counts, too. Give each rank a folder of its own. It is created if it does
            not exist. Default: ``None`` .
        batches_per_reason (int): How many batches `save_batches` keeps of each reason, the last ones. Default: ``3`` .
        max_bytes (int): How many bytes the files in `save_batches` may take together. If a further one does not fit,
            the oldest of the reason with the most files are removed before. A batch that is larger by itself is not
            kept, of which one `RuntimeWarning` tells. Default: ``2**30`` .
        underflow_every_n_steps (int, optional): After how many steps underflow is measured on the step's batch. If in
            the scaled float16 gradients of a weight at least a tenth of the values are zero or subnormal that are not
            so at a larger loss scale, one `RuntimeWarning` names the weights, the shares, and that scale. It then
            looks no longer at this loss. Needs a training cell, and in a loop of your own `inputs`. Like
            :func:`profile_gradients` it runs in PyNative mode and changes nothing but, if training runs in PyNative
            mode, dropout's random numbers.

            Such a step costs a further forward and backward, a copy of the networks' weights while it lasts, and
            reading the gradients; where float16 values of the gradients are zero or subnormal, once more at the larger
            scale, or a few times if all gradients are zero or the larger scale overflows. A network that takes a
            gradient in its forward, or that runs only in graph mode, is compiled the first time. Other steps cost
            nothing. With several ranks, each measures its own batch, so that a forward that communicates, as
            SyncBatchNorm does, may wait forever for ranks that measure less. Default: ``None`` , never.

    Raises:
        TypeError: If an argument has a wrong type, or, when the training begins, if the cell is not one of this
            package, or no training cell although `underflow_every_n_steps` is set.
        ValueError: If a number is below 1, the folder of a path does not exist, `csv` or `save_batch` is a folder,
            `summary_dir` or `save_batches` is not a folder, `csv` is a file of another kind, or `save_batch` is given
            without `max_consecutive_skips`.
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
        step 3: overflow at loss scale 1024, skipped (1 in a row), now 512; not finite: weight, bias (2 of 2 gradients)
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
        step 3: overflow at loss scale 512, skipped (1 in a row), now 256; not finite: weight, bias (2 of 2 gradients)
        step 4: loss 0.643043, loss scale 256, 6 applied, 2 skipped in all
        steps 1 to 4: 1 skipped: 1 with a loss that was not finite
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        csv: Optional[StrPath] = None,
        max_consecutive_skips: Optional[int] = None,
        save_batch: Optional[StrPath] = None,
        summary_dir: Optional[StrPath] = None,
        *,
        save_batches: Optional[StrPath] = None,
        batches_per_reason: int = 3,
        max_bytes: float = 2**30,
        underflow_every_n_steps: Optional[int] = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        self._every_n_steps = check_positive_int(owner, "every_n_steps", every_n_steps)
        self._max_skips = max_consecutive_skips
        if max_consecutive_skips is not None:
            self._max_skips = check_positive_int(owner, "max_consecutive_skips", max_consecutive_skips)
        path = _check_path(owner, "csv", csv)
        self._csv = None if path is None else CsvFile(path, Record._fields)
        self._save_batch = _check_path(owner, "save_batch", save_batch)
        if save_batch is not None and max_consecutive_skips is None:
            raise ValueError(
                f"For '{owner}', the argument 'save_batch' is {str(save_batch)!r}, but needs 'max_consecutive_skips': "
                f"only the batch that stops the training is saved."
            )
        self._summary_dir = _check_path(owner, "summary_dir", summary_dir, is_folder=True)
        folder = _check_path(owner, "save_batches", save_batches, is_folder=True)
        batches_per_reason = check_positive_int(owner, "batches_per_reason", batches_per_reason)
        if not check_number(owner, "max_bytes", max_bytes) >= 1:
            raise ValueError(f"For '{owner}', the argument 'max_bytes' must be a number >= 1, but got {max_bytes!r}.")
        self._kept = None if folder is None else KeptBatches(folder, batches_per_reason, max_bytes)
        # Whether the host looks at each step, at once, so that its batch need not be held.
        self._looks_at_each = self._max_skips is not None or self._kept is not None
        self._underflow_every = underflow_every_n_steps
        if underflow_every_n_steps is not None:
            self._underflow_every = check_positive_int(owner, "underflow_every_n_steps", underflow_every_n_steps)
        # None if nothing is to be measured any more.
        self._underflow: Optional[UnderflowWatch] = None
        self._event_files: Optional[Summary] = None
        self._unread: deque[tuple] = deque()
        self._last: Optional[tuple] = None
        self._printed_step = 0
        self._looked_at = 0
        self._watched: list[WatchedStep] = []
        self._cell: Any = None
        # How many steps there were in a loop that is watched, None in Model.
        self._steps: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks the training cell and the CSV file, and opens the summary."""
        cell = run_context.original_args().train_network
        if not isinstance(cell, TrainingCell):
            raise TypeError(
                f"For 'LossScaleMonitor', the training cell must be one of ms_lossscale, but got a "
                f"'{type(cell).__name__}'. Pass Model a ScaledTrainOneStepCell, say, without loss_fn and optimizer."
            )
        self._begin(cell)

    def _begin(self, cell):
        self._cell = cell
        accumulates = cell._settings[0].gradient_accumulation_steps > 1
        self._watched = [
            WatchedStep(step, i, cell.each_decides, self._summary_dir is not None, accumulates)
            for i, step in enumerate(cell.steps)
        ]
        self._unread.clear()
        self._last = None
        self._printed_step = 0
        self._looked_at = 0
        if self._csv is not None:
            self._csv.begin()
        if self._kept is not None:
            self._kept.begin()
        self._underflow = None if self._underflow_every is None else self._watch_underflow(cell)
        if self._summary_dir is not None:
            self._event_files = Summary(self._summary_dir)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Remembers the step, and from time to time reads and prints what was remembered."""
        params = run_context.original_args()
        self._remember(params.cur_step_num, params.net_outputs, getattr(params, "train_dataset_element", None))

    def _remember(self, step, outputs, batch):
        # Copies on the device, for which the host does not wait.
        snapshots = [each.snapshot() for each in self._watched]
        self._last = (step, outputs, batch if self._looks_at_each else None)
        self._unread.append((*self._last, snapshots))
        if self._looks_at_each or step % self._every_n_steps == 0:
            self._read()
            self._stop_if_it_only_skips(step)
            self._look_at_weights(step, _STEPS)
        if self._underflow is not None and step % self._underflow_every == 0:
            self._look_for_underflow(step, batch)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Reads what was remembered, so that nothing is missing at the end of an epoch."""
        self._end_epoch(run_context.original_args().cur_step_num)

    def _end_epoch(self, step):
        self._read()
        self._read_flush()
        self._sum_up()
        self._look_at_weights(step, _STEPS)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Reads what a callback after this one has flushed at the end of the epoch before."""
        self._read_flush()
        self._sum_up()

    def on_train_end(self, run_context: RunContext) -> None:
        """Reads what a callback after this one has flushed at the end of the last epoch, and closes the summary."""
        self._end(run_context.original_args().cur_step_num)

    def _end(self, step):
        self._read_flush()
        self._sum_up()
        self._look_at_weights(step, 1)
        self._close_event_files()

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
        if not isinstance(cell, TrainingState):
            raise TypeError(
                f"For 'LossScaleMonitor.watching', the argument 'cell' must be a training cell of ms_lossscale or a "
                f"ManualStep, but got {describe(cell)}. Pass the one whose steps the loop makes."
            )
        self._steps = 0
        try:
            with self:
                self._begin(cell)
                yield
                self._end_epoch(self._steps)
                self._end(self._steps)
        finally:
            self._steps = None

    def after_step(
        self,
        loss: Union[Tensor, float],
        overflow: Union[Tensor, bool],
        loss_scale: Optional[Tensor] = None,
        *others: Any,
        inputs: Union[Tensor, tuple, None] = None,
    ) -> None:
        """
        Remembers a step of a loop of your own within :meth:`watching`, and from time to time reads and prints what was
        remembered. Call it after each call of a training cell with all that it returned,
        ``monitor.after_step(*outputs)`` , and with a :class:`ManualStep` after `end` with two values,
        ``monitor.after_step(loss, overflow)`` .

        Args:
            loss (Union[Tensor, float]): The loss of the call.
            overflow (Union[Tensor, bool]): What the training cell, or `end`, returned.
            loss_scale (Tensor, optional): What a training cell returned. A ManualStep knows it. Default: ``None`` .
            *others (Any): What else a training cell returned.
            inputs (Union[Tensor, tuple[Tensor]], optional): The inputs of the call, for `save_batch`,
                `save_batches` and `underflow_every_n_steps`. Default: ``None`` .

        Raises:
            TypeError: If `loss` or `overflow` has a wrong type.
            ValueError: If these are not all the values that a training cell returns, or more than the two of a
                ManualStep.
            RuntimeError: Outside :meth:`watching`, or if `max_consecutive_skips` steps in a row were skipped.
        """
        self._check_is_watching("after_step")
        outputs = (_as_tensor("loss", loss), _as_tensor("overflow", overflow), loss_scale, *others)
        outputs = self._cell._outputs_of_call("LossScaleMonitor.after_step", outputs)
        self._steps += 1
        self._remember(self._steps, outputs, (inputs,) if isinstance(inputs, Tensor) else inputs)

    def after_epoch(self) -> None:
        """
        Reads what was remembered within :meth:`watching`. Call it after `flush()`: the cycle that this has ended then
        belongs to the last step, and not to the next one.

        Raises:
            RuntimeError: Outside :meth:`watching`, or if `max_consecutive_skips` steps in a row were skipped.
        """
        self._check_is_watching("after_epoch")
        self._end_epoch(self._steps)

    def _check_is_watching(self, method):
        if self._steps is None:
            raise RuntimeError(
                f"For 'LossScaleMonitor', '{method}()' is for a loop within 'watching()', but there is none. Put the "
                f"loop into: with monitor.watching(cell). Model calls the monitor itself."
            )

    def __exit__(self, *error: Any) -> None:
        try:
            self._read()
        finally:
            # Model.fit also exits after each evaluation; if the training ends normally, on_train_end closes them.
            if error[0] is not None:
                self._close_event_files()

    def _close_event_files(self):
        event_files, self._event_files = self._event_files, None
        if event_files is not None:
            event_files.close()

    def _look_at_weights(self, step, steps):
        """Looks at the weights if so many steps were made since it did."""
        if step - self._looked_at >= steps:
            self._looked_at = step
            self._cell.endless_skips.weights.look()

    def _read_flush(self):
        """Reads how a flush after the last step ended its accumulation cycle, as a further part of that step."""
        if self._last is None:
            return
        snapshots = [each.snapshot() for each in self._watched]
        if any(each.has_decided_since(snapshot) for each, snapshot in zip(self._watched, snapshots)):
            self._unread.append((*self._last, snapshots))
            self._read()
            self._stop_if_it_only_skips(self._last[0])

    def _read(self):
        rows = []
        try:
            while self._unread:
                step, outputs, batch, snapshots = self._unread[0]
                watched = list(zip(self._watched, snapshots))
                records = [each.read(step, outputs, snapshot, batch) for each, snapshot in watched]
                self._unread.popleft()
                rows += records
                if self._event_files is not None:
                    for (each, snapshot), record in zip(watched, records):
                        self._event_files.add(step, each.scalars(record, snapshot))
                if self._kept is not None:
                    self._keep(step, records)
                self._print(step, records)
        finally:
            # Even if waiting for the device was interrupted, or a warning is raised as an error.
            self._write(rows)

    def _print(self, step, records):
        for each, record in zip(self._watched, records):
            if record.retries and not record.skipped:
                each.print_retry(record)
            if record.skipped:
                each.print_skip(record)
                if self._max_skips is None and each.warn_at_floor(record):
                    self._cell.endless_skips.silence()
        if step // self._every_n_steps > self._printed_step // self._every_n_steps:
            self._printed_step = step
            print(
                f"{self._watched[0].call} {step}: {'; '.join(map(self._summary, self._watched, records))}", flush=True
            )
            for each, record in zip(self._watched, records):
                each.warn_of_unreached(record)

    def _sum_up(self):
        """Prints how many steps were skipped since it did, by reason, if any were."""
        sums = [each.sum_up() for each in self._watched]
        told = [what for _, what in sums if what]
        if told:
            call = self._watched[0].call
            (first, last), _ = sums[0]
            calls = f"{call} {first}" if first == last else f"{call}s {first} to {last}"
            print(f"{calls}: {'; '.join(told)}", flush=True)

    def _watch_underflow(self, cell):
        if not isinstance(cell, TrainingCell):
            raise TypeError(
                f"For 'LossScaleMonitor', 'underflow_every_n_steps' needs a training cell, which knows what it "
                f"differentiates, but got a '{type(cell).__name__}'. Leave it out, and call profile_gradients(forward, "
                f"step.parameters, [inputs]) from time to time, with the function that you differentiate."
            )
        return UnderflowWatch("LossScaleMonitor", cell)

    def _look_for_underflow(self, step, batch):
        """Warns of gradients that underflow in this batch at the present scale."""
        call, problem = self._watched[0].call, ""
        if batch is None:
            cure = "pass dataset_sink_mode=False" if self._steps is None else "pass inputs=(x, y), say, to after_step"
            problem = f"the batch is not known: {cure}"
        else:
            try:
                for found in self._underflow.look(batch):
                    warnings.warn(
                        f"For 'LossScaleMonitor', {call} {step}: {found}. {self._on_larger_scale(found)}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            except (RuntimeError, TypeError, ValueError) as error:
                problem = str(error)
        if problem:
            warnings.warn(
                f"For 'LossScaleMonitor', {call} {step}: underflow can't be measured, and is no longer: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )
        if problem or self._underflow.is_done():
            self._underflow = None

    def _on_larger_scale(self, found):
        """Says how the loss scale gets there."""
        loss_scales = self._cell._loss_scales
        loss_scale = loss_scales[found.number if len(loss_scales) > 1 else 0]
        scale, highest = written_scale(found.sufficient), loss_scale.max_loss_scale
        by_hand = f"cell.set_loss_scale({scale}), or cell.find_loss_scale(*inputs), sets it at once"
        if not loss_scale.backs_off:
            return f"This loss scale does not rise by itself: begin with {scale}, or with a DynamicLossScale."
        if highest is not None and highest < found.sufficient:
            return (
                f"The loss scale never gets there: pass max_loss_scale={scale} or more, instead of "
                f"{written_scale(highest)}."
            )
        return f"The loss scale rises towards it while steps are clean; {by_hand}."

    def _keep(self, step, records):
        """Keeps the batches of what was skipped."""
        for each, record in zip(self._watched, records):
            if not record.skipped:
                continue
            if each.batch is None:
                self._kept.warn_of_no_batch(is_loop=self._steps is not None)
                continue
            network = f"_network_{record.network}" if len(self._watched) > 1 else ""
            self._kept.keep(f"{each.call}_{step}{network}", next(iter(each.why)), each.batch)

    def _write(self, rows):
        if self._csv is not None:
            self._csv.append(rows)
        if self._event_files is not None:
            self._event_files.flush()

    def _summary(self, watched, record):
        network = f"network {record.network}: " if len(self._watched) > 1 else ""
        counts = watched.counts(record)
        return f"{network}loss {record.loss:.6g}, loss scale {record.loss_scale.written()}, {counts}"

    def _stop_if_it_only_skips(self, step):
        for each in self._watched:
            if self._max_skips is not None and each.has_skipped and each.consecutive >= self._max_skips:
                scales = ", ".join(scale.written() for scale in each.series.loss_scales)
                raise RuntimeError(
                    f"For 'LossScaleMonitor', training was stopped at {each.call} {step}: "
                    f"{each.last_were_skipped()} (max_consecutive_skips={self._max_skips}), at the loss "
                    f"scales {scales}; {each.what_it_means()} {self._save(each)}"
                )

    def _save(self, watched):
        """Saves the batch. Returns a sentence about it."""
        if self._save_batch is None:
            return "With save_batch='batch.npz', LossScaleMonitor saves the batch that stops the training."
        if watched.batch is None:
            if self._steps is not None:
                return "The batch could not be saved: pass it to after_step, with inputs=(x, y), say."
            return "The batch could not be saved: with a data sink, MindSpore does not give it to callbacks."
        try:
            save_inputs(self._save_batch, watched.batch)
        except OSError as error:
            # The reason why the training was stopped matters more.
            return (
                f"The batch could not be saved: {str(self._save_batch)!r} can't be written: {error.strerror} (errno "
                f"{error.errno})."
            )
        what, batch = "network", f"tuple(np.load({str(self._save_batch)!r}).values())"
        if watched.series.is_manual:
            what = "forward"
        if watched.series.shows_no_overflow():
            parameters = "step.parameters, " if watched.series.is_manual else ""
            return f"The batch was saved: profile_gradients({what}, {parameters}[{batch}]) shows its gradients."
        return (
            f"The batch was saved: locate_overflow({what}, {batch}, "
            f"loss_scale={written_scale(watched.series.overflowed_scale())})."
        )


def _as_tensor(name, value):
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (bool, int, float, np.number, np.bool_)):
        raise TypeError(
            f"For 'LossScaleMonitor.after_step', the argument '{name}' must be a Tensor or a number, but got "
            f"{describe(value)}. Pass what the step returned, one by one: after_step(*outputs)."
        )
    return Tensor(value)


def _check_path(owner, name, value, is_folder=False):
    """Raises unless `value` is None or a path of that kind, in an existing folder. Returns a Path or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a path or None, but got {describe(value)}.")
    if is_folder and not os.fspath(value):
        raise ValueError(
            f"For '{owner}', the argument '{name}' must be a folder, but got an empty path: {value!r}. Pass '.' for "
            f"the present one, or None."
        )
    path = Path(value)
    if not path.parent.is_dir():
        raise ValueError(
            f"For '{owner}', the argument '{name}' must be in a folder that exists, but got {str(path)!r}. Make the "
            f"folder first."
        )
    if path.exists() and path.is_dir() != is_folder:
        wanted, got = ("folder", "file") if is_folder else ("file", "folder")
        raise ValueError(f"For '{owner}', the argument '{name}' must be a {wanted}, but {str(value)!r} is a {got}.")
    return path
