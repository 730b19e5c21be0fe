"""What the host reads of tensors."""

import contextlib

from mindspore import Tensor

READING = ("asnumpy", "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")


@contextlib.contextmanager
def recorded(monkeypatch):
    """A context in which each read is noted in the list that it yields."""
    reads = []
    with monkeypatch.context() as patched:
        for name in filter(lambda name: hasattr(Tensor, name), READING):
            patched.setattr(Tensor, name, noting(getattr(Tensor, name), name, reads))
        yield reads


def noting(read, name, reads):
    def noted(tensor, *args, **keywords):
        reads.append(name)
        return read(tensor, *args, **keywords)

    return noted
