"""Files that grow during a training: CSV, and event files for MindInsight and TensorBoard."""

import contextlib
import importlib
import io
import os
import shutil
import time
import uuid
import warnings
from csv import writer

from mindspore import SummaryRecord, Tensor
from mindspore import dtype as mstype

from ms_lossscale._output import replacing


def warn_of_failed_file(argument, path, error):
    """Warns that a log can't be written, which is no reason to end a training."""
    warnings.warn(
        f"For 'LossScaleMonitor', the argument '{argument}' is {str(path)!r}, which can't be written: {error.strerror} "
        f"(errno {error.errno}). Training goes on and writes no more there; what was written can be read. Make "
        f"room or pass another path before the next training.",
        RuntimeWarning,
        stacklevel=2,
    )


class CsvFile:
    """
    Writes the rows of a training as they come, and only whole rows.

    If the file can't be written any more, it warns once, and the training goes on. An existing file with the same
    columns is continued. One that lacks the last column, of an earlier version, first gets it.
    """

    def __init__(self, path, columns):
        self._path, self._columns = path, columns
        self._has_failed = False

    def begin(self):
        """Begins or continues the file, at the beginning of each training."""
        self._has_failed = False
        header = ",".join(self._columns).encode()
        # A file that is not regular, such as /dev/null, has nothing to continue.
        before = self._path.read_bytes() if self._path.is_file() else b""
        if before and before.splitlines()[0] == header.rpartition(b",")[0]:
            try:
                before = self._with_last_column(before, header)
            except OSError as error:
                self._has_failed = True
                warn_of_failed_file("csv", self._path, error)
                return
        if before and before.splitlines()[0] != header:
            raise ValueError(
                f"For 'LossScaleMonitor', the argument 'csv' is {str(self._path)!r}, which has other columns than "
                f"{', '.join(self._columns)}. Give the name of a new file, or of one of an earlier run."
            )
        with open(self._path, "ab") as file:
            whole = before.rfind(b"\n") + 1
            # A run that was killed may have left an incomplete line.
            if whole < len(before):
                file.truncate(whole)
        if not whole:
            self._write(header + b"\r\n")

    def _with_last_column(self, before, header):
        """Adds the last column to a file, empty in all its rows. Returns the file's new bytes."""
        _, *rows = before[: before.rfind(b"\n") + 1].splitlines()
        after = b"\r\n".join([header, *(row + b"," for row in rows), b""])
        path = self._path.resolve()
        with replacing(path) as part:
            part.write_bytes(after)
            shutil.copymode(path, part)
        return after

    def append(self, rows):
        """Writes rows to the end of the file."""
        if rows and not self._has_failed:
            text = io.StringIO(newline="")
            writer(text).writerows(rows)
            self._write(text.getvalue().encode())

    def _write(self, lines):
        try:
            # Unbuffered: a buffer would keep what could not be written, and try again when the file is closed.
            with open(self._path, "ab", buffering=0) as file:
                _write_whole_lines(file, lines)
        except OSError as error:
            self._has_failed = True
            warn_of_failed_file("csv", self._path, error)


def _write_whole_lines(file, lines):
    """Writes bytes to the end of a file. Writes as many whole lines as fit, and raises an OSError if not all do."""
    start, written = file.tell(), 0
    try:
        while written < len(lines):
            written += file.write(lines[written:])
    except OSError:
        # Some files that are not regular can't be truncated.
        with contextlib.suppress(OSError):
            file.truncate(start + lines.rfind(b"\n", 0, written) + 1)
        raise


class Summary:
    """
    Writes scalars of steps to MindSpore's event files and, if a package for it is installed, to TensorBoard's.

    If TensorBoard's file can't be written any more, it warns once; MindSpore logs an error itself.
    """

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self._folder = folder
        # Both name a file by the second in which it is opened, and overwrite one that exists.
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
        """Calls a function with TensorBoard's writer, if there is one, and drops the writer if its file fails."""
        if self._tensorboard is None:
            return
        try:
            write(self._tensorboard)
        except OSError as error:
            self._tensorboard = None
            warn_of_failed_file("summary_dir", self._folder, error)


class _TensorboardXWriter:
    """
    Writes what tensorboardX's `SummaryWriter` writes, but without its thread. That thread ends if the file fails, and
    adding further scalars then waits forever.
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
    """Returns a writer for TensorBoard, or None if no package that has one is installed."""
    with contextlib.suppress(ImportError):
        return _TensorboardXWriter(folder, suffix)
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder, filename_suffix=suffix)
    return None
