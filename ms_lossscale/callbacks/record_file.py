"""The record of a step, and the CSV file of these."""

import csv
from typing import NamedTuple, Optional

from ms_lossscale._words import Values

# A file that version 0.4 began goes on with as many columns.
_COLUMNS_OF_0_4 = 12


class Record(NamedTuple):
    """One step, or one network's part of it: a row of the CSV file."""

    step: int
    network: int
    loss: float
    loss_scale: Values
    skipped: int
    applied_steps: int
    skipped_steps: int
    consecutive_skipped_steps: int
    next_loss_scale: Values
    overflowed_parameters: str
    retries: int
    skip_reasons: str
    grad_norm: Optional[Values]
    step_loss: Optional[float]
    dropped_calls: int


class RecordFile:
    """A CSV file of records. One that exists is continued."""

    def __init__(self, path):
        self._path = path
        # A file that is not regular, such as /dev/null, has nothing to continue.
        before = path.read_bytes() if path.is_file() else b""
        whole_lines = before[: before.rfind(b"\n") + 1]
        header = before.partition(b"\n")[0].decode(errors="replace").rstrip("\r")
        self._columns = self._columns_of(header, is_whole=bool(whole_lines))
        if len(whole_lines) < len(before):
            # A run that was killed has left an incomplete line.
            path.write_bytes(whole_lines)
        if not whole_lines:
            self.append([Record._fields])

    def append(self, rows):
        with open(self._path, "a", newline="") as file:
            csv.writer(file).writerows(row[: self._columns] for row in rows)

    def _columns_of(self, header, is_whole):
        """Returns how many columns a file has, of whose first line this, or the beginning of it, is there."""
        for columns in (len(Record._fields), _COLUMNS_OF_0_4):
            expected = ",".join(Record._fields[:columns])
            if header == (expected if is_whole else expected[: len(header)]):
                return columns
        raise ValueError(
            f"For 'LossScaleMonitor', the argument 'csv' is {str(self._path)!r}, which has other columns than "
            f"{', '.join(Record._fields)}. Give the name of a new file, or of one of an earlier run."
        )
