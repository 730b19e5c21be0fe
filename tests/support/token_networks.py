"""A loss that is a sum over tokens, their number, and what one batch with all tokens would train, in NumPy."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

WIDTH = 4
LEARNING_RATE = 0.1


class Tokens(nn.Cell):  # The sum of squared errors over the tokens that a mask keeps, and their number.
    def __init__(self, name="tokens", weight_as=None):
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(-1, 1, WIDTH).astype(np.float32)), name=f"{name}.weight")
        self.weight_as = weight_as

    def construct(self, x, y, mask):
        loss = (ops.square((x * self.weight).sum(-1) - y) * mask).sum()
        if self.weight_as == "mean":
            return loss / mask.sum()
        return loss, mask.sum()


def batch(valid, seed=0, length=6):  # A batch of so many tokens, of which so many are valid.
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(length, WIDTH)).astype(np.float32), rng.normal(size=length).astype(np.float32)
    return x, y, (np.arange(length) < valid).astype(np.float32)


def tensors(data):
    return [Tensor(each) for each in data]


def gradient(weight, batches):
    """Returns, in float64, the gradient of the mean over all valid tokens of the batches, which is 0 without any."""
    total, count = np.zeros(WIDTH), 0.0
    for x, y, mask in batches:
        x, y, mask = (each.astype(np.float64) for each in (x, y, mask))
        total += (2 * ((x @ weight - y) * mask)[:, None] * x).sum(0)
        count += mask.sum()
    return total / count if count else total


def weight_of(network):
    return network.weight.asnumpy().astype(np.float64)


def sgd(network):
    return nn.SGD([network.weight], LEARNING_RATE)
