"""A callback that tells what the loss scale does, and stops a training that only skips."""

import os
import warnings
from csv import writer
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mindspore.train import Callback

from ms_lossscale import _gradients as gradients
from ms_lossscale._check import check_positive_int, describe
from ms_lossscale._files import replacing
from ms_lossscale._loss_scale_values import LossScaleValues
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.cell_watch import as_array
from ms_lossscale.loss_scale import DynamicLossScale

_MOST_NAMES = 5
_ADVICE = (
    "What to try: locate_overflow on this batch names the first cell whose values leave float16's range; compute that "
    "cell in float32; look for NaN in the data; lower the learning rate or clip the gradients."
)


class _Record(NamedTuple):
    """One step, or the part of it that one network of several made: a row of the CSV file."""

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


class LossScaleMonitor(Callback):
    """
    Prints the loss, the loss scale and the counters of a training cell, and for every skipped step the new scale and
    the parameters whose gradients were not finite.

    Of skipped steps in a row the 1st, 2nd, 3rd, 5th, 10th, 20th, 50th, 100th and so on are printed; the CSV file has
    all.

    Values are read from the device every `every_n_steps` steps, and in each step if `max_consecutive_skips` is set.
    With the data sink of Ascend and GPU, MindSpore calls callbacks less often: what they miss is counted, not named.

    A partial window that :class:`FlushAccumulation` ends belongs to the epoch's last step, wherever it stands among
    the callbacks: that step then has a second row in the CSV file.

    Args:
        every_n_steps (int): After how many steps a line is printed, beside those of skipped steps. Default: ``100`` .
        csv (str, optional): A file to write a row for each step to; with an :class:`AlternatingTrainOneStepCell` one
            for each of its networks. Several loss scales of one step stand there as ``65536.0/4096.0``. An existing
            file of this kind is continued. Default: ``None`` .
        max_consecutive_skips (int, optional): Stop the training when so many steps in a row were skipped.
            Default: ``None`` , which warns when a :class:`DynamicLossScale` has fallen to its `min_loss_scale` and the
            step is skipped all the same.
        save_batch (str, optional): Where to save the inputs of the step that stopped the training, an ``.npz`` file
            for `locate_overflow`; when accumulating, those of the window's first call that overflowed.
            Default: ``None`` .

    Raises:
        TypeError: If an argument has a wrong type, or, when the training begins, if the cell is none of this package.
        ValueError: If a number is below 1, a path is in no folder, `csv` is a file of another kind, or `save_batch` is
            given without `max_consecutive_skips`.
        RuntimeError: In the training, if `max_consecutive_skips` steps in a row were skipped.

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
    """

    def __init__(self, every_n_steps=100, csv=None, max_consecutive_skips=None, save_batch=None):
        super().__init__()
        owner = type(self).__name__
        self._every_n_steps = check_positive_int(owner, "every_n_steps", every_n_steps)
        self._max_skips = max_consecutive_skips
        if max_consecutive_skips is not None:
            self._max_skips = check_positive_int(owner, "max_consecutive_skips", max_consecutive_skips)
        self._csv = _check_path(owner, "csv", csv)
        self._save_batch = _check_path(owner, "save_batch", save_batch)
        if save_batch is not None and max_consecutive_skips is None:
            raise ValueError(
                f"For '{owner}', the argument 'save_batch' is {str(save_batch)!r}, but needs 'max_consecutive_skips': "
                f"only the batch that stops the training is saved."
            )
        self._unread = []
        self._last = None
        self._printed_step = 0
        self._watched = []

    def on_train_begin(self, run_context):
        """
        Checks the training cell and the CSV file.

        Args:
            run_context (RunContext): What `Model` knows of the training.
        """
        cell = run_context.original_args().train_network
        if not isinstance(cell, TrainingCell):
            raise TypeError(
                f"For 'LossScaleMonitor', the training cell must be one of ms_lossscale, but got a "
                f"'{type(cell).__name__}'. Pass Model a ScaledTrainOneStepCell, say, without loss_fn and optimizer."
            )
        self._watched = [_Watched(step, i, cell.each_decides) for i, step in enumerate(cell.steps)]
        self._unread = []
        self._last = None
        self._printed_step = 0
        if self._csv is not None:
            self._begin_csv()

    def on_train_step_end(self, run_context):
        """
        Remembers the step, and from time to time reads and prints what was remembered.

        Args:
            run_context (RunContext): What `Model` knows of the training.
        """
        params = run_context.original_args()
        # Copies on the device, which the host does not wait for.
        snapshots = [each.snapshot() for each in self._watched]
        batch = None if self._max_skips is None else getattr(params, "train_dataset_element", None)
        self._last = (params.cur_step_num, params.net_outputs)
        self._unread.append((*self._last, snapshots, batch))
        if self._max_skips is not None or params.cur_step_num % self._every_n_steps == 0:
            self._read()
            self._stop_if_it_only_skips(params.cur_step_num)

    def on_train_epoch_end(self, run_context):
        """
        Reads what was remembered, so that nothing is missing at the end of an epoch.

        Args:
            run_context (RunContext): What `Model` knows of the training.
        """
        self._read()
        self._read_flush()

    def on_train_epoch_begin(self, run_context):
        """
        Reads the window that a callback after this one has flushed at the end of the epoch before.

        Args:
            run_context (RunContext): What `Model` knows of the training.
        """
        self._read_flush()

    def on_train_end(self, run_context):
        """
        Reads the window that a callback after this one has flushed at the end of the last epoch.

        Args:
            run_context (RunContext): What `Model` knows of the training.
        """
        self._read_flush()

    def __exit__(self, *error):
        self._read()

    def _read_flush(self):
        """Reads the verdict on a window that has ended since the last step, as a further one of that step."""
        if self._last is None:
            return
        snapshots = [each.snapshot() for each in self._watched]
        if any(each.has_decided_since(snapshot) for each, snapshot in zip(self._watched, snapshots)):
            step, outputs = self._last
            self._unread.append((step, outputs, snapshots, None))
            self._read()
            self._stop_if_it_only_skips(step)

    def _read(self):
        unread, self._unread = self._unread, []
        rows = []
        for step, outputs, snapshots, batch in unread:
            records = [each.read(step, outputs, snapshot, batch) for each, snapshot in zip(self._watched, snapshots)]
            for each, record in zip(self._watched, records):
                if record.retries and not record.skipped:
                    each.tell_of_retry(record)
                if record.skipped:
                    each.tell_of_skip(record)
                    if self._max_skips is None:
                        each.warn_at_floor(record)
            if step // self._every_n_steps > self._printed_step // self._every_n_steps:
                self._printed_step = step
                print(f"step {step}: {'; '.join(map(self._summary, records))}", flush=True)
            rows += records
        if self._csv is not None and rows:
            with open(self._csv, "a", newline="") as file:
                writer(file).writerows(rows)

    def _summary(self, record):
        network = f"network {record.network}: " if len(self._watched) > 1 else ""
        return (
            f"{network}loss {record.loss:.6g}, loss scale {record.loss_scale:g}, {record.applied_steps} applied, "
            f"{record.skipped_steps} skipped"
        )

    def _stop_if_it_only_skips(self, step):
        for each in self._watched:
            if self._max_skips is not None and each.has_skipped and each.consecutive >= self._max_skips:
                scales = ", ".join(f"{scale:g}" for scale in each.skipped_at)
                raise RuntimeError(
                    f"For 'LossScaleMonitor', training was stopped at step {step}: the last "
                    f"{each.consecutive} steps{each.of_network} were skipped (max_consecutive_skips="
                    f"{self._max_skips}), at the loss scales {scales}; {each.blame()}. {_ADVICE} "
                    f"{self._save(each)}"
                )

    def _save(self, watched):
        """Saves the batch. Returns what to tell of it."""
        if self._save_batch is None:
            return "With save_batch='batch.npz', LossScaleMonitor saves the batch that stops the training."
        if watched.batch is None:
            return "The batch could not be saved: with a data sink, MindSpore does not give it to callbacks."
        with replacing(self._save_batch) as part, open(part, "wb") as file:
            np.savez(file, **{f"input_{i}": value.asnumpy() for i, value in enumerate(watched.batch)})
        return (
            f"The batch was saved: locate_overflow(network, tuple(np.load({str(self._save_batch)!r}).values()), "
            f"loss_scale={watched.scale_to_blame():g})."
        )

    def _begin_csv(self):
        if not self._csv.exists() or self._csv.stat().st_size == 0:
            with open(self._csv, "w", newline="") as file:
                writer(file).writerow(_Record._fields)
            return
        with open(self._csv, newline="") as file:
            if file.readline().strip() != ",".join(_Record._fields):
                raise ValueError(
                    f"For 'LossScaleMonitor', the argument 'csv' is {str(self._csv)!r}, which has other columns than "
                    f"{', '.join(_Record._fields)}. Give the name of a new file, or of one of an earlier run."
                )


class _Snapshot(NamedTuple):
    """Tuples of copies of what the next step will change: retries are none if none are counted."""

    counts: tuple
    overflowed: tuple
    retries: tuple
    scales: tuple


class _Watched:
    """
    What a monitor knows of one verdict.

    Args:
        step (Step): The step that reaches it.
        network (int): Which of several networks that decide alone it is about.
        is_one_of_several (bool): Whether there are several.
    """

    def __init__(self, step, network, is_one_of_several):
        self._step = step
        self._network = network
        self._is_one_of_several = is_one_of_several
        self.of_network = f" of network {network}" if is_one_of_several else ""
        self._names = [weight.name for weight in step.optimizers.parameters]
        counters = step.step_counters.as_dict()
        self._applied_steps = counters["applied_steps"]
        self._skipped_steps = counters["skipped_steps"]
        self.consecutive = counters["consecutive_skipped_steps"]
        self._retries = counters.get("retries", 0)
        self._scale_before = LossScaleValues(loss_scale.get_loss_scale() for loss_scale in step.loss_scales)
        # The loss scales of the steps that were skipped since the last one that was not.
        self.skipped_at = []
        # Whether the step that was read last was skipped.
        self.has_skipped = False
        # The inputs of the last call that overflowed; in a window of accumulation, of the first one.
        self.batch = None
        self._is_in_overflow = False
        self._overflowed = []
        # Which of its loss scales were warned of.
        self._warned = set()
        # Whether a line tells of the present series of skipped steps, and how many it has had since.
        self._is_told = False
        self._untold = 0

    def snapshot(self):
        """Copies of what the next step will change."""
        counters = self._step.step_counters
        counts = (counters.applied_steps, counters.skipped_steps, counters.consecutive_skipped_steps)
        retries = (counters.retries,) if counters.counts_retries else ()
        scales = tuple(loss_scale.scale_value for loss_scale in self._step.loss_scales)
        return _Snapshot(*map(gradients.copy, (counts, (counters.overflowed,), retries, scales)))

    def has_decided_since(self, snapshot):
        """Whether a step was applied or skipped since the last one that was read."""
        applied_steps, skipped_steps, _ = _ints(snapshot.counts)
        return applied_steps + skipped_steps != self._applied_steps + self._skipped_steps

    def read(self, step, outputs, snapshot, batch):
        """The record of a step, from what the training cell returned, the snapshot after it, and its inputs."""
        loss, overflow, loss_scale = (as_array(outputs[i]) for i in (3 if self._is_one_of_several else 0, 1, 2))
        if self._is_one_of_several:
            loss, overflow, loss_scale = (value[self._network] for value in (loss, overflow, loss_scale))
        self._applied_steps, skipped_steps, self.consecutive = _ints(snapshot.counts)
        skipped, self._skipped_steps = skipped_steps - self._skipped_steps, skipped_steps
        retries_before, self._retries = self._retries, sum(_ints(snapshot.retries))
        scales = LossScaleValues(float(scale.asnumpy()) for scale in snapshot.scales)
        self._tried_first_at, self._scale_before = self._scale_before, scales
        loss_scale = LossScaleValues(np.atleast_1d(loss_scale).tolist())
        self.has_skipped = skipped > 0
        if overflow and not self._is_in_overflow:
            self.batch = batch
        self._is_in_overflow = overflow and not skipped
        if self.consecutive == 0:
            self.skipped_at.clear()
            self._warned.clear()
        if self.consecutive <= skipped:
            # No step of an earlier series is among those in a row.
            self._is_told, self._untold = False, 0
        if skipped:
            self.skipped_at.append(loss_scale)
            self._overflowed = [name for name, bad in zip(self._names, snapshot.overflowed[0].asnumpy()) if bad]
        return _Record(
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
        )

    def tell_of_retry(self, record):
        """Prints a line of a step that was saved."""
        print(
            f"step {record.step}: overflow{self.of_network} at {self._tried_first_at:g}, done again at "
            f"{record.loss_scale:g}",
            flush=True,
        )

    def tell_of_skip(self, record):
        """Prints a line, but ever more seldom of an endless series."""
        self._untold += record.skipped
        new = range(self.consecutive - record.skipped + 1, self.consecutive + 1)
        if self._is_told and not any(map(_is_milestone, new)):
            return
        more = f", {self._untold} since the last line" if self._untold > 1 else ""
        print(
            f"step {record.step}: overflow{self.of_network} at loss scale {record.loss_scale:g}, skipped "
            f"({self.consecutive} in a row{more}), now {record.next_loss_scale:g}; {self.blame()}",
            flush=True,
        )
        self._is_told, self._untold = True, 0

    def blame(self):
        """The parameters whose gradients were not finite in the last step that was skipped."""
        names = self._overflowed
        if not names:
            return (
                "all gradients are finite, so it was the status register, an overflow detector of your own, or what "
                "the forward wrote (see forward_state_names()) that told"
            )
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        return f"not finite: {shown} ({len(names)} of {len(self._names)} gradients)"

    def warn_at_floor(self, record):
        """Warns, once until a step is applied, if no smaller scale can come."""
        scales = zip(self._step.loss_scales, record.loss_scale, self._step.to_blame(self._overflowed))
        for i, (loss_scale, used, is_to_blame) in enumerate(scales):
            is_at_floor = isinstance(loss_scale, DynamicLossScale) and used <= loss_scale.min_loss_scale
            if is_at_floor and is_to_blame and i not in self._warned:
                self._warned.add(i)
                of_network = f" of network {i}" if len(self._step.loss_scales) > 1 else self.of_network
                warnings.warn(
                    f"The loss scale{of_network} is stuck at its floor, min_loss_scale="
                    f"{loss_scale.min_loss_scale:g}: step {record.step} overflowed all the same; {self.blame()}. "
                    f"{_ADVICE}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def scale_to_blame(self):
        """The loss scale at which the last step that was skipped overflowed; of several the first to blame."""
        return self.skipped_at[-1][self._step.to_blame(self._overflowed).index(True)]


def _ints(tensors):
    return [int(tensor.asnumpy()) for tensor in tensors]


def _is_milestone(number):
    """Whether it is 1, 2, 3, 5, 10, 20, 50, 100 or so on."""
    return number == 3 or str(number).rstrip("0") in ("1", "2", "5")


def _check_path(owner, name, value):
    """Raises unless `value` is None or a path in a folder that exists. Returns it as a Path or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a path or None, but got {describe(value)}.")
    path = Path(value)
    if not path.parent.is_dir():
        raise ValueError(
            f"For '{owner}', the argument '{name}' must be in a folder that exists, but got {str(path)!r}. Make the "
            f"folder first."
        )
    return path
