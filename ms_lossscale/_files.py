"""Writing whole files or none."""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def replacing(path):
    """Gives a path to write to, which takes the place of `path` when all is written: no file is ever half there."""
    path = Path(path)
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path, text):
    """Writes the text to a file, if `path` is not None. Returns the text."""
    if path is not None:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    return text
