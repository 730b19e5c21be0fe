"""Networks in which one known cell exceeds float16's range."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

N = 4


def dense():
    """Returns a layer that nearly passes on its input."""
    weight = np.eye(N, dtype=np.float32) + 0.01
    return nn.Dense(N, N, weight_init=Tensor(weight), bias_init="zeros")


class SoftmaxByHand(nn.Cell):
    """Computes exp(5) to exp(15), and more in later blocks."""

    def construct(self, x):
        e = ops.exp(x * 5.0)
        return e / e.sum(-1, keepdims=True)


class RootMeanSquare(nn.Cell):
    """Computes squares that overflow."""

    def __init__(self):
        super().__init__()
        self.gamma = Parameter(Tensor(np.ones(N), mstype.float32))

    def construct(self, x):
        x = x * 400.0
        return x / ops.sqrt((x * x).mean(-1, keep_dims=True) + 1e-3) * self.gamma


class LongSum(nn.Cell):
    """Adds many numbers before it divides by their count."""

    def construct(self, x):
        return x + ops.tile(x * 40.0, (1, 2000)).sum(-1, keepdims=True) / 320000.0


class Attention(nn.Cell):
    """Has logits beyond 65504 in its own construct, not in a cell."""

    def __init__(self):
        super().__init__()
        self.q = dense()
        self.k = dense()
        self.v = dense()

    def construct(self, x):
        q, k, v = self.q(x) * 150.0, self.k(x) * 150.0, self.v(x)
        logits = ops.matmul(q, ops.swapaxes(k, 0, 1))
        return ops.matmul(ops.softmax(logits / 65536.0, -1), v)


class SmallInBetween(nn.Cell):
    """Stays in range in the forward. In the backward, the gradient is 2**20 times as large in between."""

    def construct(self, x):
        return x * 2.0**-11 * 2.0**-9 * 2.0**9 * 2.0**11


class WritesSquares(nn.Cell):
    """Overflows only in what it writes."""

    def __init__(self):
        super().__init__()
        self.seen = Parameter(Tensor(0.0, mstype.float32), requires_grad=False)

    def construct(self, x):
        ops.assign(self.seen, ops.cast((x * 300.0 * 300.0).max(), mstype.float32))
        return x


class CastsByHand(nn.Cell):
    """A loss with a product that refuses float32 from the cell that overflows."""

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


class Peak(nn.Cell):
    """Makes the gradient 2**14 times as large in between, in the backward."""

    def construct(self, x):
        return x * 2.0**-7 * 2.0**-7 * 2.0**7 * 2.0**7


class Faint(nn.Cell):
    """Has a weight whose gradients are 2**-32 of what flows through the cell."""

    def __init__(self):
        super().__init__()
        self.faint = Parameter(Tensor(np.ones(N), mstype.float32))

    def construct(self, x):
        return x + self.faint * 2.0**-16 * 2.0**-16


class Block(nn.Cell):
    def __init__(self, middle):
        super().__init__()
        self.first = dense()
        self.middle = middle
        self.last = dense()

    def construct(self, x):
        return x + self.last(self.middle(self.first(x)))


def batch(seed=0):
    random = np.random.default_rng(seed)
    return tuple(Tensor(random.uniform(1.0, 3.0, (8, N)), mstype.float32) for _ in range(2))
