"""Writing whole files or none."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from ms_lossscale._types import StrPath


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
