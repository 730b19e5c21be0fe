"""In graph mode, MindSpore keeps what a branch computes and returns until it takes that branch in an odd call again."""

import ctypes
import gc

import numpy as np
import pytest
from mindspore import GRAPH_MODE, Tensor, nn, ops
from support.in_mode import in_mode

from ms_lossscale._mindspore.graphs import only_if

CALLS = 600
FEW = 40
MALLINFO2 = getattr(ctypes.CDLL(None), "mallinfo2", None)


class Counts(ctypes.Structure):
    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(7)] + [("in_use", ctypes.c_size_t)]
    _fields_ += [("free", ctypes.c_size_t), ("at_top", ctypes.c_size_t)]


class Computes(nn.Cell):
    def construct(self, x):
        return x + 1 if x.sum() > 0 else x * 2


class Writes(nn.Cell):
    def __init__(self):
        super().__init__()
        self.written = nn.BatchNorm1d(2).moving_mean

    def construct(self, x):
        return only_if(x.sum() > 0, self.write, x)

    def write(self, x):
        return ops.assign(self.written, x)


def kept_by_a_call(cell, signs):
    """Returns how many bytes a call keeps, of calls with inputs of these signs in turn."""
    MALLINFO2.restype = Counts
    inputs = [Tensor(np.array([2 * sign, -sign], np.float32)) for sign in signs]
    in_use = []
    for _ in range(2):
        for i in range(CALLS):
            cell(inputs[i % len(inputs)]).asnumpy()
        gc.collect()
        in_use.append(MALLINFO2().in_use)
    return (in_use[1] - in_use[0]) / CALLS


@pytest.mark.skipif(MALLINFO2 is None, reason="This C library does not tell how much memory is in use.")
@pytest.mark.parametrize(
    "cell, signs, grows",
    [(Computes, [1, -1], True), (Computes, [1, -1, -1], False), (Computes, [1], False), (Writes, [1, -1], False)],
)
def test_a_branch_keeps_what_it_computes_and_returns(cell, signs, grows):
    with in_mode(GRAPH_MODE):
        kept = kept_by_a_call(cell(), signs)
    assert kept > 10 * FEW if grows else abs(kept) < FEW
