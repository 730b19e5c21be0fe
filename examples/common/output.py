"""What examples and benchmarks write: whole files or none, and tables."""

import contextlib
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


def markdown_table(header, rows, left=1):
    """A table in GitHub's Markdown, its first `left` columns to the left and the others to the right."""
    align = ["left"] * left + ["right"] * (len(header) - left)
    return tabulate(rows, header, tablefmt="pipe", colalign=align, disable_numparse=True) + "\n"
