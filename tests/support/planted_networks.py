"""Networks in which one known cell leaves float16's range, with what the diagnoses must say of each."""

from typing import Callable, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

N = 4
FLOAT16_MAX = 65504.0


class Function(nn.Cell):  # Any function of a tensor.
    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, x):
        return self.function(x)


def times(factor):
    return Function(lambda x: x * factor)


class Chain(nn.Cell):
    """A layer that puts out twice its input, then cells one after the other, and their mean in float32."""

    def __init__(self, *cells, dtype=mstype.float16):
        super().__init__()
        self.first, self.cells_ = nn.Dense(2, 2, weight_init="ones", has_bias=False), nn.SequentialCell(*cells)
        if dtype == mstype.float16:
            self.first.to_float(dtype)
            self.cells_.to_float(dtype)

    def construct(self, x):
        return self.cells_(self.first(x)).astype(mstype.float32).mean()


def chain32(*cells):
    return Chain(*cells, dtype=mstype.float32)


class BetweenCells(nn.Cell):  # Overflows in its own construct, between two cells.
    def __init__(self):
        super().__init__()
        self.first = nn.Dense(2, 2, weight_init="ones", has_bias=False).to_float(mstype.float16)
        self.second = times(0.5)

    def construct(self, x):
        return self.second(self.first(x) * 1000.0).astype(mstype.float32).mean()


def rows(*values):  # An input whose rows hold these values.
    return Tensor(np.repeat(np.float32(values)[:, None], 2, axis=1))


class Planted(NamedTuple):  # What locate_overflow must say of a network and its input at a loss scale.
    network: Callable
    x: Tensor
    loss_scale: float
    # The cell, the direction, what overflows and how.
    says: str
    index: tuple
    value: float
    # How many values of the cell's output are not finite, as profile_activations counts them.
    non_finite: int = 0
    note: str = ""
    # What is printed.
    printed: str = ""


_HELD = "Float32 holds this value; float16 could not."
_BETWEEN = "it was computed between cells, in the construct of the one around them."
INF, NAN = float("inf"), float("nan")
XS = {x: rows(*x) for x in ((1, 100), (1, -0.5), (1, 200), (1, 2), (1,), (200,))}
AT_MOST = Function(lambda x: ops.minimum(x * 1000.0, Tensor(FLOAT16_MAX, mstype.float16)))
LOG, LOG_OF_4_LESS = Function(lambda x: ops.log(x)), Function(lambda x: ops.log(x - 4.0))
# fmt: off
PLANTED = {name: Planted(network, XS[x], *its) for name, network, x, *its in (
    # 2, 200 -> 8, 800 -> 2400, inf.
    ("inf", lambda: Chain(times(4.0), times(300.0), times(3.0)), (1, 100), 1.0,
     "cells_.1 forward output inf", (1, 0), INF, 2, "",
     "The first overflow at loss scale 1 in training mode is in the forward of cells_.1: its output is inf "
     "(inf) at (1, 0)\n"
     "  tensor: Float16 (2, 2): 2400 to 2400, 2 non-finite\n  the cell's input 0: Float16 (2, 2): 8 to 800"),
    ("nan", lambda: Chain(times(1.0), LOG, times(2.0)), (1, -0.5), 1.0,
     "cells_.1 forward output NaN", (1, 0), NAN, 2),
    ("the largest float16", lambda: Chain(AT_MOST, times(0.001)), (1, 200), 1.0,
     "cells_.0 forward output saturated", (1, 0), FLOAT16_MAX),
    ("between cells", BetweenCells, (1, 100), 1.0,
     "second forward output inf", (1, 0), INF, 2, _BETWEEN),
    ("float32 holds it", lambda: chain32(times(1e5), times(1e-5)), (1, 2), 1.0,
     "cells_.0 forward output saturated", (0, 0), 2e5, 0, _HELD),
    # The logarithms of -2 and 0.
    ("another than float32 holds", lambda: chain32(times(1e5), times(1e-5), LOG_OF_4_LESS), (1, 2), 1.0,
     "cells_.2 forward output NaN", (0, 0), NAN, 4),
    # The gradient that reaches the cells is 1024 / 2; cells_.1 makes it 300 times larger.
    ("backward", lambda: Chain(times(0.01), times(300.0), times(1.0)), (1,), 1024.0,
     "cells_.1 backward gradient inf", (0, 0), INF, 0, "",
     "in the backward of cells_.1: the gradient that it passes back is inf (inf) at (0, 0)\n"
     "  tensor: Float16 (1, 2): no finite value, 2 non-finite"),
    # The gradient of the layer's output is 512, of its weight 512 times the inputs' sum.
    ("a weight", lambda: Chain(times(1.0)), (200,), 1024.0,
     "first backward first.weight inf", (0, 0), INF, 0, "",
     "in the backward of first: the gradient of first.weight is inf (inf) at (0, 0)"),
)}
# fmt: on


# Parts of float16 networks that need float32.


def dense():  # A layer that nearly passes on its input.
    weight = np.eye(N, dtype=np.float32) + 0.01
    return nn.Dense(N, N, weight_init=Tensor(weight), bias_init="zeros")


class SoftmaxByHand(nn.Cell):  # Computes exp(5) to exp(15), and more in later blocks.
    def construct(self, x):
        e = ops.exp(x * 5.0)
        return e / e.sum(-1, keepdims=True)


class RootMeanSquare(nn.Cell):  # Computes squares that overflow.
    def __init__(self):
        super().__init__()
        self.gamma = Parameter(Tensor(np.ones(N), mstype.float32))

    def construct(self, x):
        x = x * 400.0
        return x / ops.sqrt((x * x).mean(-1, keep_dims=True) + 1e-3) * self.gamma


class Attention(nn.Cell):  # Has logits beyond 65504 in its own construct, not in a cell.
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = dense(), dense(), dense()

    def construct(self, x):
        q, k, v = self.q(x) * 150.0, self.k(x) * 150.0, self.v(x)
        logits = ops.matmul(q, ops.swapaxes(k, 0, 1))
        return ops.matmul(ops.softmax(logits / 65536.0, -1), v)


class SmallInBetween(nn.Cell):
    """Stays in range in the forward. In the backward, the gradient is 2**20 times as large in between."""

    def construct(self, x):
        return x * 2.0**-11 * 2.0**-9 * 2.0**9 * 2.0**11


class WritesSquares(nn.Cell):  # Overflows only in what it writes.
    def __init__(self):
        super().__init__()
        self.seen = Parameter(Tensor(0.0, mstype.float32), requires_grad=False)

    def construct(self, x):
        ops.assign(self.seen, ops.cast((x * 300.0 * 300.0).max(), mstype.float32))
        return x


class CastsByHand(nn.Cell):  # A loss with a product that refuses float32 from the cell that overflows.
    def __init__(self):
        super().__init__()
        self.large = Square().to_float(mstype.float16)
        self.weight = Parameter(Tensor(np.full((N, 1), 1e-3), mstype.float32))

    def construct(self, x):
        y = ops.matmul(self.large(x), self.weight.astype(mstype.float16))
        return y.astype(mstype.float32).mean()


class Square(nn.Cell):
    def construct(self, x):
        return ops.sqrt(ops.square(x * 300.0))


class Block(nn.Cell):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = dense(), middle, dense()

    def construct(self, x):
        return x + self.last(self.middle(self.first(x)))


def batch(seed=0):
    random = np.random.default_rng(seed)
    return tuple(Tensor(random.uniform(1.0, 3.0, (8, N)), mstype.float32) for _ in range(2))
