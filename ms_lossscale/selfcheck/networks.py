"""The networks of the checks, which compute in float16 and overflow where a check wants it."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

# At these inputs, of float16 weights of about 2 and a loss scale of 2**12, the forward overflows, or only the backward.
FORWARD_OVERFLOWS, BACKWARD_OVERFLOWS = 60000.0, 100.0
LOSS_SCALE = 2.0**12
# Of each weight and of each input.
SIZE = 4


class Products(nn.Cell):
    """
    The sum of so many products, each of a weight and an input of its own: any of them can overflow, in the forward
    (weight * input) or in the backward (loss scale * input), by the arithmetic of the device.
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


def slow_adam(network):
    """An optimizer that moves the weights so little that they stay about 2."""
    return nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-5)


def cell_of_products(device, loss_scale=None, **keywords):
    """A training cell of three Products; a dynamic scale if none is given."""
    network = Products(device)
    loss_scale = loss_scale or DynamicLossScale(LOSS_SCALE)
    return ScaledTrainOneStepCell(network, slow_adam(network), loss_scale, **keywords).set_train()


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

    def __init__(self, seed):
        super().__init__()
        weight = np.random.default_rng(seed).normal(size=(SIZE, 1)).astype(np.float32)
        self.weight = Parameter(Tensor(weight), name="weight")

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.weight) - y).mean()


def decaying_adam(network):
    """An optimizer whose learning rate shows how many steps it has made."""
    rate = nn.ExponentialDecayLR(0.01, 0.9, 4)
    return nn.AdamWeightDecay(network.trainable_params(), learning_rate=rate)


def cell_of_linear(seed, loss_scale, **keywords):
    network = Linear(seed)
    return ScaledTrainOneStepCell(network, decaying_adam(network), loss_scale, **keywords).set_train()


def regression(seed):
    """A batch for Linear."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, SIZE)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
