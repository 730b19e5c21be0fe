"""
GANs as other people's code has them: two loss cells that share both networks go into the cells as they are.

The oracle is `mindspore.grad` of each loss alone and the stock optimizers, at the same weights for all losses or one
loss after the other.
"""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.gan_networks import ClipWeights, renamed, take
from support.networks import BATCH, FEATURES, weight
from support.training import changed

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, SimultaneousTrainOneStepCell

pytestmark = pytest.mark.long

NOISE = 2
BOTH = pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])


def data(seed=0, overflow=False):
    """(real, noise, gain); the losses are multiplied by the gain."""
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    noise = rng.normal(size=(BATCH, NOISE)).astype(np.float32)
    return Tensor(real), Tensor(noise), Tensor(np.float32(np.inf if overflow else 1.0))


def train_by_hand(make, losses, optimizers, positions, batches):
    """What the cell has to do. Each loss cell returns a loss, or a tuple whose first element is the loss."""
    gradients = [
        mindspore.grad(OnlyTheLoss(loss).set_train(), None, optimizer.parameters)
        for loss, optimizer in zip(losses, optimizers)
    ]
    for inputs in batches:
        pairs = [(gradient, take(its, inputs)) for gradient, its in zip(gradients, positions)]
        if make is AlternatingTrainOneStepCell:
            for (gradient, its_inputs), optimizer in zip(pairs, optimizers):
                optimizer(gradient(*its_inputs))
        else:
            all_gradients = [gradient(*its_inputs) for gradient, its_inputs in pairs]
            for its_gradients, optimizer in zip(all_gradients, optimizers):
                optimizer(its_gradients)


class OnlyTheLoss(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        output = self.network(*inputs)
        if isinstance(output, tuple):
            output = output[0]
        return output


def adams(*networks):
    return [nn.Adam(network.trainable_params(), learning_rate=0.05, beta1=0.5) for network in networks]


def weights(*networks):
    return {p.name: p.asnumpy().copy() for network in networks for p in network.get_parameters()}


class Matrix(nn.Cell):
    """A layer without a bias."""

    def __init__(self, inputs, outputs, seed):
        super().__init__()
        self.weight = weight(inputs, outputs, seed=seed, name="weight")

    def construct(self, x):
        return ops.matmul(x, self.weight)


class GeneratorLoss(nn.Cell):
    """Adversarial loss and a perceptual one; returns the samples too."""

    def __init__(self, generator, discriminator, features):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator, self.features = generator, discriminator, features

    def construct(self, real, noise, gain):
        fake = ops.tanh(self.generator(noise))
        perceptual = ops.square(self.features(fake) - self.features(real)).mean()
        return (perceptual - self.discriminator(fake).mean()) * gain, fake


class DiscriminatorLoss(nn.Cell):
    """The loss of a Wasserstein critic; returns the scores too."""

    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator

    def construct(self, noise, real, gain):
        fake = ops.stop_gradient(ops.tanh(self.generator(noise)))
        real_score, fake_score = self.discriminator(real), self.discriminator(fake)
        return (fake_score.mean() - real_score.mean()) * gain, real_score, fake_score


@BOTH
class TestWassersteinGan:
    """Own inputs, extra outputs, weight clipping after the update, and a third network that only one loss uses."""

    POSITIONS = ((0, 1, 2), (1, 0, 2))

    @pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "in_no_optimizer"])
    def test_trains(self, mode, make, frozen):
        generator, discriminator, features = networks = self.networks(frozen)
        optimizers = adams(generator, discriminator)
        clip = ClipWeights(discriminator.trainable_params(), 0.3)
        cell = make(
            [GeneratorLoss(generator, discriminator, features), DiscriminatorLoss(generator, discriminator)],
            optimizers,
            DynamicLossScale(2.0**10),
            network_inputs=self.POSITIONS,
            has_aux=True,
            after_update=clip if make is SimultaneousTrainOneStepCell else [None, clip],
        ).set_train()
        before = weights(*networks)
        cell(*data(overflow=True))
        # Not even the clipping, which would move the weights.
        assert not changed(before, weights(*networks))

        real, noise, gain = data()
        *_, losses, ((fake,), (real_score, fake_score)) = cell(real, noise, gain)
        expected_fake = np.tanh(noise.asnumpy() @ before["generator.weight"])
        np.testing.assert_allclose(fake.asnumpy(), expected_fake, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            real_score.asnumpy(), real.asnumpy() @ before["discriminator.weight"], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            losses.asnumpy()[1], (fake_score.asnumpy() - real_score.asnumpy().mean()).mean(), rtol=1e-5, atol=1e-6
        )

        expected = generator, discriminator, features = self.networks(frozen)
        train_by_hand(
            make,
            [GeneratorLoss(generator, discriminator, features), DiscriminatorLoss(generator, discriminator)],
            adams(generator, discriminator),
            self.POSITIONS,
            [(real, noise, gain)],
        )
        wanted = weights(*expected)
        assert np.abs(wanted["discriminator.weight"]).max() > 0.3
        wanted["discriminator.weight"] = np.clip(wanted["discriminator.weight"], -0.3, 0.3)
        assert not changed(weights(*networks), wanted)
        # The third network has not moved; both others have.
        assert changed(before, wanted) == {"generator.weight", "discriminator.weight"}

    @staticmethod
    def networks(frozen):
        generator = renamed("generator.", Matrix(NOISE, FEATURES, seed=0))
        discriminator = renamed("discriminator.", Matrix(FEATURES, 1, seed=1))
        features = renamed("features.", Matrix(FEATURES, 2, seed=2))
        features.weight.requires_grad = not frozen
        return generator, discriminator, features
