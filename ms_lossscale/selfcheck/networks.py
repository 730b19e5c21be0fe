"""The networks of the checks, which compute in float16 and overflow where a check wants it."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

# At these inputs, of float16 weights of about 2 and a loss scale of 2**12, the forward overflows, or only the backward.
FORWARD_OVERFLOWS, BACKWARD_OVERFLOWS = 60000.0, 100.0
LOSS_SCALE = 2.0**12
# Of each weight and of each input.
SIZE = 4


class Products(nn.Cell):
    """
    The sum of products, each of a weight and an input of its own: any of them can overflow, in the forward
    (weight * input) or in the backward (loss scale * input).

    Args:
        device (Device): Whose arithmetic it is.
        count (int): How many products there are.
        prefix (str): For the names of the weights.
    """

    def __init__(self, device, count=3, prefix=""):
        super().__init__()
        self.weights = ParameterTuple(
            Parameter(Tensor(np.full(SIZE, 2.0, np.float32)), name=f"{prefix}weight_{i}") for i in range(count)
        )
        # A weight's gradient flows into the first of them, and that of its product into the second.
        self.weight_arithmetic = nn.CellList([device.arithmetic(f"{prefix}weight {i}") for i in range(count)])
        self.product_arithmetic = nn.CellList([device.arithmetic(f"{prefix}product {i}") for i in range(count)])

    def construct(self, *inputs):
        loss = 0
        for i, x in enumerate(inputs):
            weight = self.weight_arithmetic[i](self.weights[i].astype(mstype.float16))
            product = self.product_arithmetic[i](weight * x.astype(mstype.float16))
            loss += product.astype(mstype.float32).sum()
        return loss


def inputs(*values):
    """Inputs of Products: each is of one value."""
    return [Tensor(np.full(SIZE, value, np.float32)) for value in values]


class Normalised(nn.Cell):
    """
    A network that writes in its forward: BatchNorm's statistics, and a count of its own. It takes a batch and a factor
    at which it overflows or not.
    """

    def __init__(self, device):
        super().__init__()
        rng = np.random.default_rng(0)
        self.dense = nn.Dense(SIZE, SIZE, Tensor(rng.normal(size=(SIZE, SIZE)).astype(np.float32)))
        self.norm = nn.BatchNorm1d(SIZE)
        self.calls = Parameter(Tensor(0, mstype.int32), name="calls", requires_grad=False)
        self.one = Tensor(1, mstype.int32)
        self.arithmetic = device.arithmetic("product")

    def construct(self, x, factor):
        ops.assign_add(self.calls, self.one)
        hidden = self.norm(self.dense(x)).astype(mstype.float16)
        return ops.square(self.arithmetic(hidden * factor.astype(mstype.float16)).astype(mstype.float32)).mean()


class Linear(nn.Cell):
    """The mean squared error of a linear model, in float32, of which NumPy can compute the gradient."""

    def __init__(self, weight, name="weight"):
        super().__init__()
        self.weight = Parameter(Tensor(weight.astype(np.float32)), name=name)

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.weight) - y).mean()


def regression(seed):
    """A batch for Linear."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, SIZE)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
