"""Event files with scalars, for MindInsight and for TensorBoard."""

import importlib
import uuid
import warnings

from mindspore import SummaryRecord, Tensor
from mindspore import dtype as mstype

_TENSORBOARD_WRITERS = ("tensorboardX", "torch.utils.tensorboard")


class Summary:
    """
    Scalars of steps, in MindSpore's event files and, where a package that writes them is installed, in TensorBoard's.

    Args:
        folder (Path): Where to.
    """

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        # Both name a file by the second that it is opened in, and open it anew if it is there.
        unique = f"_{uuid.uuid4().hex[:8]}"
        self._tensorboard = _tensorboard_writer(str(folder), unique)
        self._record = None
        if not SummaryRecord.count:
            self._record = SummaryRecord(str(folder), file_suffix=f"{unique}_MS", num_process=1)
        elif self._tensorboard is None:
            raise RuntimeError(
                "For 'LossScaleMonitor', the argument 'summary_dir' needs a SummaryRecord, of which MindSpore allows "
                "one at a time, and another callback has opened one. Install tensorboardX, which needs none, or leave "
                "out 'summary_dir' or the other callback."
            )
        else:
            warnings.warn(
                "For 'LossScaleMonitor', only files for TensorBoard are written to 'summary_dir': MindSpore allows one "
                "SummaryRecord at a time, and another callback has opened one.",
                RuntimeWarning,
                stacklevel=2,
            )

    def add(self, step, scalars):
        """Adds the scalars of a step, a dict of tags to numbers."""
        if self._record is not None:
            for tag, value in scalars.items():
                self._record.add_value("scalar", tag, Tensor(value, mstype.float32))
            self._record.record(step)
        if self._tensorboard is not None:
            for tag, value in scalars.items():
                self._tensorboard.add_scalar(tag, value, step)

    def flush(self):
        for writer in (self._record, self._tensorboard):
            if writer is not None:
                writer.flush()

    def close(self):
        for writer in (self._record, self._tensorboard):
            if writer is not None:
                writer.close()


def _tensorboard_writer(folder, suffix):
    """A SummaryWriter, or None if no package that has one is installed."""
    for name in _TENSORBOARD_WRITERS:
        try:
            return importlib.import_module(name).SummaryWriter(folder, filename_suffix=suffix)
        except ImportError:
            continue
    return None
