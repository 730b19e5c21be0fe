"""Tables as text, for people and for programs."""

import csv
import io
import math


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


def power(loss_scale):
    """A power of two, as such."""
    return "1" if loss_scale == 1 else f"2^{math.frexp(loss_scale)[1] - 1}"


def counted(number, noun, plural):
    """A number of things."""
    return f"{number} {noun if number == 1 else plural}"


def in_batches(number):
    return f"in {counted(number, 'batch', 'batches')}"
