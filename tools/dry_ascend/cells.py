"""
The cells under test, by name: make(name, optimizer) returns (function, inputs). A name is a kind and additions, ours+bn+retries:
kinds plain, stock, ours, gan, ganalt, manual; additions bn, retries, accumulate, jit (of manual: the step is compiled).
"""

import os

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

import ms_lossscale as ls

SCALE, WINDOW = float(os.environ.get("DRY_SCALE", 2**16)), int(os.environ.get("DRY_WINDOW", 100))
RANDOM = np.random.RandomState(0)
X, TARGET = Tensor(RANDOM.randn(4, 8).astype(np.float32)), Tensor(RANDOM.randn(4, 4).astype(np.float32))


class Mlp(nn.Cell):
    def __init__(self, dtype=mstype.float16):
        super().__init__()
        self.f1, self.f2, self.relu = nn.Dense(8, 16), nn.Dense(16, 4), nn.ReLU()
        self.to_float(dtype)

    def construct(self, x):
        return self.f2(self.relu(self.f1(x)))


class Normalized(nn.Cell):
    def __init__(self):
        super().__init__()
        self.f1, self.norm, self.f2 = (
            nn.Dense(8, 16).to_float(mstype.float16),
            nn.BatchNorm1d(16),
            nn.Dense(16, 4).to_float(mstype.float16),
        )

    def construct(self, x):
        return self.f2(ops.relu(self.norm(ops.cast(self.f1(x), mstype.float32))))


class Squares(nn.Cell):
    """The mean square of a difference, in float32."""

    def construct(self, y, target):
        difference = ops.cast(y, mstype.float32) - target
        return ops.mean(difference * difference)


class WithLoss(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network, self.loss = network, Squares()

    def construct(self, x, target):
        return self.loss(self.network(x), target)


class DiscriminatorLoss(nn.Cell):
    def __init__(self, g, d):
        super().__init__()
        self.g, self.d = g, d

    def construct(self, z, x):
        fake = ops.stop_gradient(self.g(z)).astype(mstype.float32)
        return ops.mean(self.d(fake).astype(mstype.float32)) - ops.mean(self.d(x).astype(mstype.float32))


class GeneratorLoss(nn.Cell):
    def __init__(self, g, d):
        super().__init__()
        self.g, self.d = g, d

    def construct(self, z, x):
        return 0 - ops.mean(self.d(self.g(z).astype(mstype.float32)).astype(mstype.float32))


OPTIMIZERS = {
    "momentum": lambda parameters: nn.Momentum(parameters, 0.01, 0.9),
    "adam": lambda parameters: nn.Adam(parameters, 0.01),
    "adamw": lambda parameters: nn.AdamWeightDecay(parameters, 0.01),
    "sgd": lambda parameters: nn.SGD(parameters, 0.01),
    "expadam": lambda parameters: mindspore.experimental.optim.Adam(parameters, 0.01),
    "lamb": lambda parameters: nn.Lamb(parameters, 0.01),
}
# Training cells of ours, for checks that go through all of them.
TRAINING_CELLS = ("ours", "ours+bn", "ours+retries", "ours+accumulate", "gan", "gan+retries", "ganalt")


def manual(network, optimizer, compiled):
    step = ls.ManualStep(network, optimizer, ls.DynamicLossScale(SCALE, 2, WINDOW))
    loss_fn = Squares()

    def forward(x, target):
        return loss_fn(network(x), target)

    value_and_grad = step.value_and_grad(forward)

    def one_step(x, target):
        x, target = step.begin(x, target)
        loss, grads = value_and_grad(x, target)
        return loss, step.end(grads)

    return mindspore.jit(one_step) if compiled else one_step


def make(name, optimizer="momentum"):
    kind, *additions = name.split("+")
    make_optimizer, retries = OPTIMIZERS[optimizer], 2 if "retries" in additions else 0
    network = Normalized() if "bn" in additions else Mlp()
    its = make_optimizer(network.trainable_params())
    if kind == "manual":
        return manual(network, its, "jit" in additions), (X, TARGET)
    if kind == "plain":
        cell = nn.TrainOneStepCell(WithLoss(network), its)
    elif kind == "stock":
        cell = nn.TrainOneStepWithLossScaleCell(WithLoss(network), its, nn.DynamicLossScaleUpdateCell(SCALE, 2, WINDOW))
    elif kind == "ours":
        more = {"gradient_accumulation_steps": 2} if "accumulate" in additions else {}
        cell = ls.ScaledTrainOneStepCell(
            WithLoss(network), its, ls.DynamicLossScale(SCALE, 2, WINDOW), max_retries=retries, **more
        )
    else:
        which = {"gan": ls.SimultaneousTrainOneStepCell, "ganalt": ls.AlternatingTrainOneStepCell}[kind]
        g, d = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 8)).to_float(mstype.float16), Mlp()
        optimizers = [make_optimizer(each.trainable_params()) for each in (d, g)]
        cell = which(
            [DiscriminatorLoss(g, d), GeneratorLoss(g, d)],
            optimizers,
            ls.DynamicLossScale(SCALE, 2, WINDOW),
            max_retries=retries,
        )
        return cell.set_train(), (X, X)
    return cell.set_train(), (X, TARGET)
