"""Small networks that several tests train, and their data. Each network returns its loss."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

FEATURES = 3
BATCH = 4


def weight(*shape, seed=0, name, dtype=np.float32):
    """Returns a Parameter whose values depend only on the seed, so that two networks can start alike."""
    values = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    return Parameter(Tensor(values), name=name)


def batch(seed=0):  # One batch of inputs and targets.
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    y = rng.normal(size=(BATCH, 1)).astype(np.float32)
    return Tensor(x), Tensor(y)


def overflowing_batch(seed=0):  # A batch that makes the gradients infinite or NaN, whatever the weights are.
    x, y = (tensor.asnumpy() for tensor in batch(seed))
    x[0, 0] = np.inf
    return Tensor(x), Tensor(y)


def batch_for(overflow, seed=0):  # An ordinary batch, or one that overflows.
    return overflowing_batch(seed) if overflow else batch(seed)


class Around(nn.Cell):  # Calls a network, or a training cell, whose names stay.
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)


class Linear(nn.Cell):
    """Mean squared error of a linear model. The gradient of the weight is `2 / BATCH * x.T @ (x @ weight - y)`."""

    def __init__(self, seed=0):
        super().__init__()
        self.weight = weight(FEATURES, 1, seed=seed, name="weight")

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.weight) - y).mean()


class LinearWithBias(nn.Cell):  # Mean squared error of a linear model with a matrix and a vector among its weights.
    def __init__(self, seed=0):
        super().__init__()
        self.weight = weight(FEATURES, 2, seed=seed, name="weight")
        self.bias = weight(2, seed=seed + 1, name="bias")

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.weight) + self.bias - y).mean()


class Mlp(nn.Cell):  # Mean squared error of two layers, with matrices and vectors among the weights.
    def __init__(self, seed=0):
        super().__init__()
        self.hidden = weight(FEATURES, 5, seed=seed, name="hidden.weight")
        self.hidden_bias = weight(5, seed=seed + 1, name="hidden.bias")
        self.output = weight(5, 1, seed=seed + 2, name="output.weight")
        self.output_bias = weight(1, seed=seed + 3, name="output.bias")

    def construct(self, x, y):
        hidden = ops.tanh(ops.matmul(x, self.hidden) + self.hidden_bias)
        return ops.square(ops.matmul(hidden, self.output) + self.output_bias - y).mean()


class Normalised(nn.Cell):  # A linear model whose inputs go through a normalisation with moving statistics.
    def __init__(self, norm=None):
        super().__init__()
        self.norm, self.weight = norm or nn.BatchNorm1d(FEATURES), weight(FEATURES, 1, name="weight")

    def construct(self, x, y):
        return ops.square(ops.matmul(self.norm(x), self.weight) - y).mean()


class LossOfShape(nn.Cell):  # A linear model that returns its squared errors as a loss of shape (), (1,) or (B, 1).
    def __init__(self, shape):
        super().__init__()
        self.weight, self.shape = weight(FEATURES, 1, name="weight"), shape

    def construct(self, x, y):
        errors = ops.square(ops.matmul(x, self.weight) - y)
        if self.shape == (BATCH, 1):
            return errors
        return errors.sum().reshape(self.shape)


class HalfPrecision(nn.Cell):  # A linear model in float16, including its weight and its loss.
    def __init__(self):
        super().__init__()
        self.weight = weight(FEATURES, 1, name="weight", dtype=np.float16)

    def construct(self, x, y):
        return ops.square(ops.matmul(x.astype(mstype.float16), self.weight) - y.astype(mstype.float16)).mean()
