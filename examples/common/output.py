"""What the examples write: whole files or none, and smoothed curves."""

import contextlib
import os

import numpy as np

from common.retries import Retries


@contextlib.contextmanager
def replacing(path):
    """Gives a path to write to, which takes the place of `path` when all is written: no file is ever half there."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def print_steps(cell, epoch, steps_per_epoch, skipped):
    """Prints how many steps a training cell has made, and what became of those that overflowed."""
    retries = Retries(cell).total()
    again = f", after {retries} retries at lower loss scales" if retries else ""
    print(f"Trained {epoch} epochs of {steps_per_epoch} steps; skipped {skipped} steps that overflowed{again}")


def running_mean(values, window):
    """The mean of the last `window` values at each place, of those that are finite."""
    finite = np.isfinite(values)
    sums, counts = (
        np.convolve(terms, np.ones(window))[: len(values)] for terms in (np.where(finite, values, 0.0), finite)
    )
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
