"""Numbers, tables and counts as text."""

import csv
import io
import math
from collections.abc import Iterable

import numpy as np


def text_table(header, rows):
    """Returns a table as text: the first column is aligned left, the others right."""
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def csv_text(header, rows):
    """Returns the text of a CSV file, in which None is an empty field."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()


def size(value):
    """Returns a number with three digits, or a dash for None."""
    return "-" if value is None else f"{value:.2e}"


def percent(share):
    """Returns a share in per cent. A share above zero is never shown as 0.00."""
    if 0 < share < 0.0001:
        return "<0.01"
    return f"{100 * share:.2f}"


def written_scale(value: float) -> str:
    """
    Returns a loss scale as text that Python reads as the same float32. Powers of two of more than six digits are
    written as such, ``2**33`` or ``2**-10``, and other integers as integers.
    """
    value = float(value)
    significand, exponent = math.frexp(value)
    if significand == 0.5 and not 2.0**-6 <= value < 2.0**20:
        return f"2**{exponent - 1}"
    return str(int(value)) if value.is_integer() else str(np.float32(value))


def counted(number, noun, plural):
    """Returns the number with its noun, in the singular or plural."""
    return f"{number} {noun if number == 1 else plural}"


def in_mode(train):
    return f"in {'training' if train else 'evaluation'} mode"


def in_batches(number):
    return f"in {counted(number, 'batch', 'batches')}"


class Values(tuple):
    """Numbers of a step, one for each network or loss scale: ``1.5/0.3333333333333333`` in a file, empty for None."""

    def __str__(self):
        return "/".join("" if value is None else str(value) for value in self)


def written_values(values: Values) -> str:
    """Returns the text for people, ``1.5/0.333333`` say, with a dash for None."""
    return "/".join("-" if value is None else f"{value:.6g}" for value in values)


def written_scales(loss_scales: Iterable[float]) -> str:
    """Returns the loss scale of a step for people, ``65536`` say, or ``65536/4096`` if each network has its own."""
    return "/".join(map(written_scale, loss_scales))
