"""
The cells under test: small, of Dense layers alone, so that a pretended NPU can compute them. A name is a kind and what
it has, "scaled with 8 layers, max_retries=3": see KINDS and settings.py. names.py has the names that are counted.
"""

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from dry.names import BATCH_NORM, LAYERS
from dry.settings import with_settings
from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ManualStep,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)

random = np.random.RandomState(0)
X = Tensor(random.randn(4, 8).astype(np.float32))
TARGET = Tensor(random.randn(4, 4).astype(np.float32))


class Layers(nn.Cell):
    """Dense layers in float16, two at least."""

    def __init__(self, count=2, channels=4):
        super().__init__()
        inner = [layer for _ in range(count - 2) for layer in (nn.Dense(16, 16), nn.ReLU())]
        self.layers = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), *inner, nn.Dense(16, channels))
        self.to_float(mstype.float16)

    def construct(self, x):
        return self.layers(x)


class Normalised(nn.Cell):
    """The same with BatchNorm in float32 between them, whose statistics the forward writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(8, 16).to_float(mstype.float16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Dense(16, 4).to_float(mstype.float16)

    def construct(self, x):
        return self.second(ops.relu(self.norm(ops.cast(self.first(x), mstype.float32))))


class MeanSquare(nn.Cell):
    """The mean square of a difference, in float32."""

    def construct(self, y, target):
        difference = ops.cast(y, mstype.float32) - target
        return ops.mean(difference * difference)


class WithLoss(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.loss = MeanSquare()

    def construct(self, x, target):
        return self.loss(self.network(x), target)


class DiscriminatorLoss(nn.Cell):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def construct(self, noise, real):
        fake = ops.stop_gradient(self.generator(noise)).astype(mstype.float32)
        of_real = ops.mean(self.discriminator(real).astype(mstype.float32))
        return ops.mean(self.discriminator(fake).astype(mstype.float32)) - of_real


class GeneratorLoss(nn.Cell):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def construct(self, noise, real):
        fake = self.generator(noise).astype(mstype.float32)
        return 0 - ops.mean(self.discriminator(fake).astype(mstype.float32))


OPTIMIZERS = {
    "momentum": lambda parameters: nn.Momentum(parameters, 0.01, 0.9),
    "adam": lambda parameters: nn.Adam(parameters, 0.01),
    "adamw": lambda parameters: nn.AdamWeightDecay(parameters, 0.01),
    "sgd": lambda parameters: nn.SGD(parameters, 0.01),
    "experimental adam": lambda parameters: mindspore.experimental.optim.Adam(parameters, 0.01),
    "lamb": lambda parameters: nn.Lamb(parameters, 0.01),
}


class Maker:
    """Makes cells with an optimizer, and scales that begin at `scale` and grow after `window` steps."""

    def __init__(self, optimizer="momentum", scale=2.0**16, window=100):
        self.make_optimizer = OPTIMIZERS[optimizer]
        self.scale = scale
        self.window = window

    def optimizer(self, network):
        return self.make_optimizer(network.trainable_params())

    def loss_scale(self):
        return DynamicLossScale(self.scale, 2, self.window)

    def unscaled(self, network):
        """MindSpore's cell, which scales nothing."""
        return nn.TrainOneStepCell(WithLoss(network), self.optimizer(network)).set_train()

    def stock(self, network):
        """MindSpore's cell with a dynamic scale."""
        update = nn.DynamicLossScaleUpdateCell(self.scale, 2, self.window)
        return nn.TrainOneStepWithLossScaleCell(WithLoss(network), self.optimizer(network), update).set_train()

    def scaled(self, network, *settings):
        with_loss, keywords = with_settings(WithLoss(network), *settings)
        optimizer = self.optimizer(network)
        return ScaledTrainOneStepCell(with_loss, optimizer, self.loss_scale(), **keywords).set_train()

    def of_two_networks(self, kind, discriminator, *settings):
        generator = Layers(channels=8)
        optimizers = [self.optimizer(network) for network in (discriminator, generator)]
        losses, keywords = [], {}
        for loss in (DiscriminatorLoss(generator, discriminator), GeneratorLoss(generator, discriminator)):
            loss, keywords = with_settings(loss, *settings)
            losses.append(loss)
        return kind(losses, optimizers, self.loss_scale(), **keywords).set_train()

    def manual(self, network, *settings, compiled=False):
        loss_fn = MeanSquare()
        _, keywords = with_settings(network, *settings)
        step = ManualStep(network, self.optimizer(network), self.loss_scale(), **keywords)

        def forward(x, target):
            return loss_fn(network(x), target)

        value_and_grad = step.value_and_grad(forward)
        looks_at_loss = "skip_conditions" in keywords

        def one_step(x, target):
            x, target = step.begin(x, target)
            loss, grads = value_and_grad(x, target)
            if looks_at_loss:
                return loss, step.end(grads, loss=loss)
            return loss, step.end(grads)

        return mindspore.jit(one_step) if compiled else one_step


KINDS = {
    "unscaled": Maker.unscaled,
    "stock": Maker.stock,
    "scaled": Maker.scaled,
    "simultaneous": lambda maker, *args: maker.of_two_networks(SimultaneousTrainOneStepCell, *args),
    "alternating": lambda maker, *args: maker.of_two_networks(AlternatingTrainOneStepCell, *args),
    "manual": Maker.manual,
    "compiled manual": lambda maker, *args: maker.manual(*args, compiled=True),
}


def make(name, maker=None):
    """Returns a step of the cell of this name, and its inputs."""
    kind, _, of_it = name.partition(" with ")
    settings, network = [], None
    for each in filter(None, of_it.split(", ")):
        if each == BATCH_NORM:
            network = Normalised()
        elif each.endswith(LAYERS):
            network = Layers(int(each[: -len(LAYERS)]))
        else:
            settings.append(each)
    step = KINDS[kind](maker or Maker(), network or Layers(), *settings)
    return step, ((X, X) if kind in ("simultaneous", "alternating") else (X, TARGET))
