"""What is written for people and for programs: files, tables, numbers, pictures."""

import contextlib
import csv
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import numpy as np

from ms_lossscale._arguments import StrPath


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of `path` when all is written: no file is ever half there."""
    path = Path(path)
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Optional[StrPath], text: str) -> str:
    """Writes the text to a file, if `path` is not None. Returns the text."""
    if path is not None:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    return text


def matplotlib_figure(what):
    """The Figure of matplotlib, which only who plots needs; an ImportError that names what needs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure


def text_table(header, rows):
    """Columns as wide as their widest cell, the first one to the left, the others to the right."""
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def csv_text(header, rows):
    """A CSV file's text; None is an empty field."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return file.getvalue()


def size(value):
    """A number in three digits, or a dash for none."""
    return "-" if value is None else f"{value:.2e}"


def percent(share):
    """A share in per cent; what is more than nothing never looks like nothing."""
    if 0 < share < 0.0001:
        return "<0.01"
    return f"{100 * share:.2f}"


def written_scale(value: float) -> str:
    """
    A loss scale as one writes it, and as Python reads the very same float32: powers of two of more than six digits as
    such, ``2**33`` or ``2**-10``, other integers as integers.
    """
    value = float(value)
    significand, exponent = math.frexp(value)
    if significand == 0.5 and not 2.0**-6 <= value < 2.0**20:
        return f"2**{exponent - 1}"
    return str(int(value)) if value.is_integer() else str(np.float32(value))


def counted(number, noun, plural):
    """A number of things."""
    return f"{number} {noun if number == 1 else plural}"


def in_batches(number):
    return f"in {counted(number, 'batch', 'batches')}"


class LossScaleValues(tuple):
    """
    The loss scale of a step, in a CSV file ``65536.0``, and ``65536`` for people; where each network has its own,
    ``65536.0/4096.0`` and ``65536/4096``.
    """

    def __str__(self):
        return "/".join(map(str, self))

    def written(self) -> str:
        """For people."""
        return "/".join(map(written_scale, self))
