"""Small folders of digits, in the form of the MNIST files that the examples read."""

import gzip
import struct

import numpy as np


def write_digits(folder, train=20, test=10):
    """Writes images that are noise but for a bright row that tells the class. Half of the files are gzipped."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = rng.integers(0, 100, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), 2 * labels + 4] = 255
        for name, items, write in (("images-idx3-ubyte.gz", images, gzip.open), ("labels-idx1-ubyte", labels, open)):
            with write(folder / f"{part}-{name}", "wb") as file:
                file.write(struct.pack(f">{1 + items.ndim}I", 0x800 + items.ndim, *items.shape) + items.tobytes())
    return folder
