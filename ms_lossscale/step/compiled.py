"""Compiled code in PyNative mode."""

from mindspore import jit, mutable, nn


class Compiled(nn.Cell):
    """
    Runs a cell as one compiled graph in PyNative mode, too.

    A cell of its own: `mindspore.jit` leaves a mark on the cell whose method it compiled, and with the mark of another
    method than `construct` that cell can no longer be compiled into another graph.

    Args:
        cell (Cell): Takes tensors and tuples of them.
    """

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

    def __call__(self, *inputs):
        # MindSpore takes a tuple for a constant otherwise.
        return super().__call__(*(mutable(each) if isinstance(each, tuple) and each else each for each in inputs))

    @jit
    def construct(self, *inputs):
        return self.cell(*inputs)
