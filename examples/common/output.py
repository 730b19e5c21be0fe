"""What examples and benchmarks write: whole files or none, and tables."""

import contextlib
import math
import os

from tabulate import tabulate


@contextlib.contextmanager
def replacing(path):
    """Gives a path to write to, which takes the place of `path` when all is written: no file is ever half there."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def written_scale(value):
    """A loss scale as one writes it: a power of two of more than six digits as such, 2**20."""
    significand, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if significand == 0.5 and value >= 2.0**20 else f"{value:.9g}"


def markdown_table(header, rows, left=1):
    """A table in GitHub's Markdown, its first `left` columns to the left and the others to the right."""
    align = ["left"] * left + ["right"] * (len(header) - left)
    return tabulate(rows, header, tablefmt="pipe", colalign=align, disable_numparse=True) + "\n"
