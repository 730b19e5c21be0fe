"""Keeps the last batches that were skipped for each reason, in files of a folder."""

import re
import warnings
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from ms_lossscale._output import replacing
from ms_lossscale._values import as_array
from ms_lossscale.callbacks.files import warn_of_failed_file
from ms_lossscale.step.step_counters import REASONS

_NAME = re.compile(rf"(?P<number>\d+)_(?:step|call)_\d+(?:_network_\d+)?_(?P<reason>{'|'.join(REASONS)})\.npz")
_UNFINISHED = re.compile(_NAME.pattern.replace(r"\.npz", r"\.part\.npz"))
# More than a file takes besides its values, in all and for each input.
_OVERHEAD = 1024


class _File(NamedTuple):
    """A file: its number, which grows from one to the next, its reason, its name and its size."""

    number: int
    reason: str
    name: str
    size: int


def save_inputs(path, batch):
    """Writes the inputs of a call to an ``.npz`` file, which is never half written."""
    arrays = {f"input_{i}": value for i, value in enumerate(_arrays(batch))}
    with replacing(path) as part, open(part, "wb") as file:
        np.savez(file, **arrays)


def _arrays(batch):
    return [as_array(each) if isinstance(each, Tensor) else np.asarray(each) for each in batch]


class KeptBatches:
    """
    Keeps so many batches of each reason, which together take so many bytes at most. Files of earlier trainings count.

    If the folder can't be written any more, it warns once, and the training goes on.
    """

    def __init__(self, folder, per_reason, max_bytes):
        self._folder, self._per_reason, self._max_bytes = folder, per_reason, max_bytes
        self._files = []
        self._number = 0
        self._has_failed = False
        self._warned_of = set()

    def begin(self):
        """Looks at what earlier trainings have left, at the beginning of each."""
        self._has_failed = False
        self._warned_of.clear()
        self._folder.mkdir(exist_ok=True)
        self._files = []
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                self._files.append(_File(int(match["number"]), match["reason"], path.name, path.stat().st_size))
            elif _UNFINISHED.fullmatch(path.name):
                # A run that was killed has left it.
                path.unlink()
        self._number = max((file.number for file in self._files), default=0)

    def keep(self, of_call, reason, batch):
        """
        Keeps a batch, unless it alone is too large. `of_call` says in its file's name where it is from. Before, the
        oldest of its reason is removed if there are enough, and the oldest of what there is most of while there is no
        room.
        """
        if self._has_failed:
            return
        size = sum(each.nbytes + _OVERHEAD for each in _arrays(batch)) + _OVERHEAD
        if size > self._max_bytes:
            self._warn_once(
                "size",
                f"a batch that was skipped takes up to {size} bytes, more than max_bytes={self._max_bytes}, and is "
                f"not kept. Pass a larger 'max_bytes'.",
            )
            return
        self._number += 1
        name = f"{self._number:06d}_{of_call}_{reason}.npz"
        try:
            while self._count(reason) >= self._per_reason:
                self._remove(min(file for file in self._files if file.reason == reason))
            while sum(file.size for file in self._files) + size > self._max_bytes:
                self._remove(min(self._files, key=lambda file: (-self._count(file.reason), file.number)))
            save_inputs(self._folder / name, batch)
            self._files.append(_File(self._number, reason, name, (self._folder / name).stat().st_size))
        except OSError as error:
            self._has_failed = True
            warn_of_failed_file("save_batches", self._folder, error)

    def warn_of_no_batch(self, is_loop):
        """Warns that the batch of a skipped step is not known."""
        why = "with a data sink, MindSpore does not give it to callbacks. Pass dataset_sink_mode=False"
        if is_loop:
            why = "it was not passed. Pass it to after_step, with inputs=(x, y), say"
        self._warn_once("batch", f"the batch of a step that was skipped could not be kept: {why}.")

    def _warn_once(self, what, message):
        if what not in self._warned_of:
            self._warned_of.add(what)
            warnings.warn(f"For 'LossScaleMonitor' with 'save_batches', {message}", RuntimeWarning, stacklevel=2)

    def _count(self, reason):
        return sum(file.reason == reason for file in self._files)

    def _remove(self, file):
        (self._folder / file.name).unlink(missing_ok=True)
        self._files.remove(file)
