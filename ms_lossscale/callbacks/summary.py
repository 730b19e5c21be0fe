"""Event files with scalars, for MindInsight and for TensorBoard."""

import importlib
import os
import time
import uuid
import warnings

from mindspore import SummaryRecord, Tensor
from mindspore import dtype as mstype

from ms_lossscale.callbacks.csv_file import warn_of_failed_file


class Summary:
    """
    Scalars of steps, in MindSpore's event files and, where a package that writes them is installed, in TensorBoard's.

    If TensorBoard's can't be written any more, that is warned of once; MindSpore logs an error by itself.

    Args:
        folder (Path): Where to.
    """

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self._folder = folder
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
        self._with_tensorboard(lambda writer: [writer.add_scalar(*scalar, step) for scalar in scalars.items()])

    def flush(self):
        if self._record is not None:
            self._record.flush()
        self._with_tensorboard(lambda writer: writer.flush())

    def close(self):
        if self._record is not None:
            self._record.close()
        self._with_tensorboard(lambda writer: writer.close())

    def _with_tensorboard(self, write):
        """Calls a function with TensorBoard's writer, if there is one, and lets that go if its file fails."""
        if self._tensorboard is None:
            return
        try:
            write(self._tensorboard)
        except OSError as error:
            self._tensorboard = None
            warn_of_failed_file("summary_dir", self._folder, error)


class _TensorboardXWriter:
    """
    What tensorboardX's `SummaryWriter` writes, without its thread: that ends at an error of the file, and who goes on
    adding scalars then waits for it without end.
    """

    def __init__(self, folder, filename_suffix):
        self._new_event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        files = importlib.import_module("tensorboardX.event_file_writer")
        self._file = files.EventsWriter(os.path.join(folder, "events"), filename_suffix)
        self.flush, self.close = self._file.flush, self._file.close

    def add_scalar(self, tag, value, step):
        event = self._new_event(wall_time=time.time(), step=step)
        event.summary.value.add(tag=tag, simple_value=value)
        self._file.write_event(event)


def _tensorboard_writer(folder, suffix):
    """A writer for TensorBoard, or None if no package that has one is installed."""
    try:
        return _TensorboardXWriter(folder, suffix)
    except ImportError:
        pass
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder, filename_suffix=suffix)
    except ImportError:
        return None
