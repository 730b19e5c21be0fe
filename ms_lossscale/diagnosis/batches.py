"""The batches that a profile runs over."""

from collections.abc import Iterator

import numpy as np
from mindspore import Tensor
from mindspore.dataset import Dataset

from ms_lossscale._arguments import describe

_CURE = "Pass a list with a tuple of the network's inputs for each batch, or a dataset."


def as_inputs(owner, name, batch):
    """A batch as a tuple of Tensors."""
    if isinstance(batch, (Tensor, np.ndarray)):
        batch = (batch,)
    if not isinstance(batch, (list, tuple)) or not all(isinstance(each, (Tensor, np.ndarray)) for each in batch):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a Tensor, a NumPy array, or a tuple of them, but got "
            f"{describe(batch)}. {_CURE}"
        )
    return tuple(Tensor(each) if isinstance(each, np.ndarray) else each for each in batch)


class Kept:
    """What an iterator gives, kept so that it can be gone through again, also if that was broken off."""

    def __init__(self, iterator):
        self._iterator = iterator
        self._kept = []

    def __iter__(self):
        yield from self._kept
        for batch in self._iterator:
            self._kept.append(batch)
            yield batch


def for_several_passes(batches):
    """The batches, as what can be gone through several times."""
    return Kept(batches) if isinstance(batches, Iterator) else batches


def each_batch(owner, batches):
    """Yields the batches as tuples of Tensors, with a progress bar if it takes long. Raises if there is none."""
    if isinstance(batches, Dataset):
        total = batches.get_dataset_size()
        batches = batches.create_tuple_iterator(num_epochs=1)
    elif isinstance(batches, (Tensor, np.ndarray)) or not hasattr(batches, "__iter__"):
        raise TypeError(
            f"For '{owner}', the argument 'batches' must be an iterable of batches, but got {describe(batches)}. "
            f"{_CURE}"
        )
    else:
        total = len(batches) if hasattr(batches, "__len__") else None
    count = 0
    for count, batch in enumerate(_with_progress_bar(batches, total, owner), start=1):
        yield as_inputs(owner, f"batches[{count - 1}]", batch)
    if count == 0:
        raise ValueError(f"For '{owner}', the argument 'batches' must not be empty. {_CURE}")


def _with_progress_bar(batches, total, description):
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    # On a terminal only, and only for what takes longer than two seconds.
    return tqdm(batches, total=total, desc=description, unit="batch", delay=2, leave=False, disable=None)
