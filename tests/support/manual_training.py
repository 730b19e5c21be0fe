"""A ManualStep, and the training cell that must do the same, on networks with BatchNorm."""

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import DynamicLossScale
from support.training import cell_of

FEATURES, BATCH = 4, 8
CYCLE = {"gradient_accumulation_steps": 2, "clip_norm": 0.5, "ema_decay": 0.9}


class Regression(nn.Cell):
    """A mean squared error, with moving statistics. It takes one output of the layers inside, or `factor` of it."""

    def __init__(self, prefix="", factor=1.0):
        super().__init__(auto_prefix=False)
        self.net = nn.SequentialCell(nn.Dense(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dense(6, 1))
        self.net.update_parameters_name(prefix)
        self.factor = factor

    def construct(self, x, y):
        return ops.square(self.factor * self.net(x) - y).mean()


def regression(seed=0, prefix=""):  # A network whose weights depend only on the seed.
    mindspore.set_seed(seed)
    return Regression(prefix)


def adam(network):
    return nn.Adam(network.trainable_params(), 1e-2)


def batch(seed, overflows=False):
    """Returns a batch; with `overflows` one that makes gradients and moving statistics infinite or NaN."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(BATCH, FEATURES)).astype(np.float32), rng.normal(size=(BATCH, 1)).astype(np.float32)
    if overflows:
        x[0, 0] = np.inf
    return Tensor(x), Tensor(y)


def batches(overflows):  # One batch for each letter: `x` for one that overflows.
    return [batch(seed, each == "x") for seed, each in enumerate(overflows)]


def train_step_of(step, networks, how="eagerly"):
    """Returns a function that makes one call of a ManualStep, with a backward for each network: it returns the losses
    and the overflow. Compiled, if `how` says so."""

    def forward_of(network, number):
        def forward(x, y):
            loss = network(x, y)
            return step.scale(loss, number), loss

        return forward

    several = isinstance(step.parameters[0], tuple)
    weights = step.parameters if several else (step.parameters,)
    first, *others = [
        mindspore.value_and_grad(forward_of(network, i), None, its_weights, has_aux=True)
        for i, (network, its_weights) in enumerate(zip(networks, weights))
    ]
    second = others[0] if others else None

    def train_step(x, y):
        x, y = step.begin(x, y)
        (_, loss), grads = first(x, y)
        if second is None:
            return (loss,), step.end(grads)
        (_, its_loss), its_grads = second(x, y)
        return (loss, its_loss), step.end(grads, its_grads)

    return mindspore.jit(train_step) if how == "in_jit" else train_step


def manual(loss_scale, how="eagerly", count=1, **keywords):
    """Returns a ManualStep of so many networks and optimizers, the networks, and its train step."""
    networks = [regression(i, f"network_{i}.") for i in range(count)]
    step = cell_of("manual", networks, list(map(adam, networks)), loss_scale, **keywords)
    return step, networks, train_step_of(step, networks, how)


def training_cell(loss_scale, count=1, **keywords):  # A training cell that must train as `manual`.
    networks = [regression(i, f"network_{i}.") for i in range(count)]
    kind = "scaled" if count == 1 else "simultaneous"
    return cell_of(kind, networks, list(map(adam, networks)), loss_scale, **keywords)


class Halve(nn.Cell):  # A gradient transform that counts its calls, which a skipped step undoes.
    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0.0), name="calls", requires_grad=False)

    def construct(self, grads):
        self.calls += 1.0
        halves = ()
        for grad in grads:
            halves += (0.5 * grad,)
        return halves


def dynamic():
    return DynamicLossScale(2.0**10, scale_window=3)
