"""A CSV file that grows while a training runs."""

import contextlib
import io
import warnings
from csv import writer


def warn_of_failed_file(argument, path, error):
    """Warns that a log can't be written, which is no reason to end a training."""
    warnings.warn(
        f"For 'LossScaleMonitor', the argument '{argument}' is {str(path)!r}, which can't be written: {error.strerror} "
        f"(errno {error.errno}). The training goes on, and writes no more there; what was written can be read. Make "
        f"room, or give another path, before the next training.",
        RuntimeWarning,
        stacklevel=2,
    )


class CsvFile:
    """
    The rows of a training, written as they come: whole rows, whatever happens.

    If the file can't be written any more, that is warned of once, and the training is left alone.

    Args:
        path (Path): The file; one of this kind is continued.
        columns (tuple[str]): The names of the columns.
    """

    def __init__(self, path, columns):
        self._path, self._columns = path, columns
        self._has_failed = False

    def begin(self):
        """Begins the file or continues it, at the beginning of each training."""
        self._has_failed = False
        header = ",".join(self._columns).encode()
        # What is no regular file, /dev/null say, has nothing to continue.
        before = self._path.read_bytes() if self._path.is_file() else b""
        if before and before.splitlines()[0] != header:
            raise ValueError(
                f"For 'LossScaleMonitor', the argument 'csv' is {str(self._path)!r}, which has other columns than "
                f"{', '.join(self._columns)}. Give the name of a new file, or of one of an earlier run."
            )
        with open(self._path, "ab") as file:
            whole = before.rfind(b"\n") + 1
            # A run that was killed may have left a part of a line.
            if whole < len(before):
                file.truncate(whole)
        if not whole:
            self._write(header + b"\r\n")

    def append(self, rows):
        """Writes rows to the end of the file."""
        if rows and not self._has_failed:
            text = io.StringIO(newline="")
            writer(text).writerows(rows)
            self._write(text.getvalue().encode())

    def _write(self, lines):
        try:
            # Without a buffer, which would keep what could not be written and try again when the file is closed.
            with open(self._path, "ab", buffering=0) as file:
                _write_whole_lines(file, lines)
        except OSError as error:
            self._has_failed = True
            warn_of_failed_file("csv", self._path, error)


def _write_whole_lines(file, lines):
    """Writes bytes to the end of a file: all, or the lines that fit and an OSError."""
    start, written = file.tell(), 0
    try:
        while written < len(lines):
            written += file.write(lines[written:])
    except OSError:
        # Some things that are no regular file can't be cut.
        with contextlib.suppress(OSError):
            file.truncate(start + lines.rfind(b"\n", 0, written) + 1)
        raise
