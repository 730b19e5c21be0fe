"""Files that are written as a whole or not at all, and pictures."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from ms_lossscale._arguments import StrPath


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Yields a path to write to. The finished file then replaces `path`, so that no file is ever half written."""
    path = Path(path)
    part = path.with_name(f"part.{path.name}")
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
    """Returns matplotlib's Figure. Raises an ImportError that says that `what` needs matplotlib if it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure
