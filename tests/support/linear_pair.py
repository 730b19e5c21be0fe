"""Linear models for one and two networks, their data, and all three training cells on them."""

import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale as ls
from support.networks import BATCH, FEATURES, Linear, weight
from support.training import cell_of

CELLS = ["scaled", "simultaneous", "alternating"]

# Positions among the three inputs x0, x1 and y.
NETWORK_INPUTS = [(0, 2), (1, 2)]


class First(Linear):  # The mean squared error of `x @ weight - y`.
    def __init__(self):
        super().__init__()
        self.weight.name = "first.weight"


class Second(nn.Cell):
    """The mean squared error of `x @ (weight + first.weight) - y`, which shows the first's weights that it used."""

    def __init__(self, first):
        super().__init__(auto_prefix=False)
        self.first, self.weight = first, weight(FEATURES, 1, seed=1, name="second.weight")

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.weight + self.first.weight) - y).mean()


def arrays(seed=0, overflows=(False, False), batch=BATCH):
    """Returns the arrays x0, x1 and y. With `overflows[i]`, only the gradients of network i are not finite."""
    rng = np.random.default_rng(seed)
    x0, x1, y = (rng.normal(size=(batch, n)).astype(np.float32) for n in (FEATURES, FEATURES, 1))
    for x, overflow in zip((x0, x1), overflows):
        if overflow:
            x[0, 0] = np.inf
    return x0, x1, y


def momentum(parameters):
    return nn.Momentum(parameters, learning_rate=0.1, momentum=0.9)


class Trained:
    """A training cell on the linear models.

    Args:
        kind (str): One of CELLS.
        scale, scale_window: Those of the DynamicLossScale.
        steps (int): Calls in a cycle."""

    def __init__(self, kind, *, scale=2.0**10, scale_window=2, steps=1, **keywords):
        self.kind, self.networks = kind, [First()]
        if kind != "scaled":
            self.networks.append(Second(self.networks[0]))
            keywords["network_inputs"] = NETWORK_INPUTS
        self.weights = [network.weight for network in self.networks]
        loss_scale = ls.DynamicLossScale(scale, scale_window=scale_window)
        optimizers, keywords["gradient_accumulation_steps"] = [momentum([own]) for own in self.weights], steps
        self.cell = cell_of(kind, self.networks, optimizers, loss_scale, **keywords)

    def call_cell(self, seed=0, overflows=(False, False)):  # Calls the cell once.
        x0, x1, y = (Tensor(array) for array in arrays(seed, overflows))
        return self.cell(x0, y) if self.kind == "scaled" else self.cell(x0, x1, y)
