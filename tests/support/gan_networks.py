"""A small GAN in the layouts that several tests train, its data, and ways to make one of its losses overflow.

The losses are those of the least-squares GAN, which MindSpore computes to the same bits each time. It does not with
`ops.softplus`: on CPU, the last bit depends on where the input lies in memory."""

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from support.networks import BATCH, FEATURES, Around, weight

NOISE = 2

# The positions of (real, noise, generator_factor, discriminator_factor) that each loss takes.
NETWORK_INPUTS = [(1, 2), (0, 1, 3)]


class Generator(nn.Cell):  # Noise to samples, with BatchNorm.
    def __init__(self, seed=0):
        super().__init__()
        self.weight, self.norm = weight(NOISE, FEATURES, seed=seed, name="weight"), nn.BatchNorm1d(FEATURES)

    def construct(self, noise):
        return ops.tanh(self.norm(ops.matmul(noise, self.weight)))


class Discriminator(nn.Cell):  # Samples to scores of shape (B, 1), with BatchNorm.
    def __init__(self, seed=0):
        super().__init__()
        self.weight, self.norm = weight(FEATURES, FEATURES, seed=seed, name="weight"), nn.BatchNorm1d(FEATURES)
        self.score = weight(FEATURES, 1, seed=seed + 1, name="score")

    def construct(self, samples):
        return ops.matmul(ops.tanh(self.norm(ops.matmul(samples, self.weight))), self.score)


class GeneratorLoss(nn.Cell):
    """The generator's loss through the discriminator. An infinite factor makes its gradients overflow."""

    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator

    def construct(self, noise, factor):
        return ops.square(self.discriminator(self.generator(noise)) - 1.0).mean() * factor


class DiscriminatorLoss(GeneratorLoss):
    """The discriminator's loss. It does not detach the generator: the training cell must keep the two apart."""

    def construct(self, real, noise, factor):
        fake = self.discriminator(self.generator(noise))
        return (ops.square(self.discriminator(real) - 1.0) + ops.square(fake)).mean() * factor


class GanLosses(GeneratorLoss):
    """Both losses as a tuple. The generator runs once, and so does the discriminator on its samples."""

    def construct(self, real, noise, generator_factor, discriminator_factor):
        fake = self.discriminator(self.generator(noise))
        generator_loss = ops.square(fake - 1.0).mean()
        discriminator_loss = (ops.square(self.discriminator(real) - 1.0) + ops.square(fake)).mean()
        return generator_loss * generator_factor, discriminator_loss * discriminator_factor


def renamed(prefix, network):
    """Puts a prefix before the names of the network's parameters, as a user of two networks must. Returns it."""
    network.update_parameters_name(prefix)
    return network


def generator_and_discriminator():  # Both networks in training mode, with distinct names and always the same weights.
    generator, discriminator = renamed("generator.", Generator()), renamed("discriminator.", Discriminator(seed=5))
    return generator.set_train(), discriminator.set_train()


def two_losses(generator, discriminator):  # The list form.
    return [GeneratorLoss(generator, discriminator), DiscriminatorLoss(generator, discriminator)]


def two_optimizers(generator, discriminator):  # Two different optimizers, so that they can't be mixed up.
    return [
        nn.Adam(generator.trainable_params(), learning_rate=0.05),
        nn.Momentum(discriminator.trainable_params(), learning_rate=0.05, momentum=0.9),
    ]


def gan_batch(seed=0, overflow_in=()):
    """Returns one call's inputs. `overflow_in` has the numbers of the losses whose gradients overflow."""
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    noise = rng.normal(size=(BATCH, NOISE)).astype(np.float32)
    factors = [Tensor(np.inf if i in overflow_in else 1.0, mindspore.float32) for i in range(2)]
    return (Tensor(real), Tensor(noise), *factors)


def take(positions, inputs):  # The inputs at the positions.
    return [inputs[position] for position in positions]


def rows_of(batches):  # Batches as rows of a dataset.
    return [tuple(tensor.asnumpy() for tensor in inputs) for inputs in batches]


class WithAux(Around):
    """Returns, after the loss of a network, multiples of its first input as aux, which nothing may train."""

    def construct(self, *inputs):
        return self.network(*inputs), inputs[0] * 2.0, inputs[0] * 3.0


class TupleOf(nn.Cell):  # Returns several losses of the same inputs as one tuple.
    def __init__(self, *networks):
        super().__init__(auto_prefix=False)
        self.networks = nn.CellList(list(networks), auto_prefix=False)

    def construct(self, *inputs):
        losses = ()
        for network in self.networks:
            losses += (network(*inputs),)
        return losses


class ClipWeights(nn.Cell):  # Weight clipping, as in a Wasserstein GAN: a Cell without inputs.
    def __init__(self, weights, bound):
        super().__init__(auto_prefix=False)
        self.weights, self.bound = mindspore.ParameterTuple(weights), bound

    def construct(self):
        for parameter in self.weights:
            ops.assign(parameter, ops.clip(parameter, -self.bound, self.bound))


class Counted(nn.Cell):  # Counts on the host how often a network of one input runs.
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.runs = network, 0
        self._operator = ops.Custom(self._count, _same, _same, func_type="pyfunc", bprop=self._bprop)

    def _count(self, array):
        self.runs += 1
        return array

    def _bprop(self, _x, _out, dout):
        return (dout,)

    def construct(self, x):
        return self._operator(self.network(x))


def _same(argument):
    return argument
