"""Output of examples and benchmarks: files that are complete or not there, and tables."""

import contextlib
import math
import os

from tabulate import tabulate


@contextlib.contextmanager
def replacing(path):
    """Yields a path to write to. The finished file then replaces `path`, so that no file is ever half written."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def written_scale(value):
    """Returns a loss scale as text; powers of two of more than six digits become 2**20, for example."""
    significand, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if significand == 0.5 and value >= 2.0**20 else f"{value:.9g}"


def counted(number, noun, plural):
    """Returns the number with its noun, in the singular or plural."""
    return f"{number} {noun if number == 1 else plural}"


def markdown_table(header, rows, left=1):
    """Returns a table in GitHub's Markdown. Its first `left` columns are aligned left, the others right."""
    align = ["left"] * left + ["right"] * (len(header) - left)
    return tabulate(rows, header, tablefmt="pipe", colalign=align, disable_numparse=True) + "\n"
