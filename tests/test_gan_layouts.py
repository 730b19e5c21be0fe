"""
GANs as other people's code has them: two loss cells that share both networks go into the cells as they are.

The oracle is `mindspore.grad` of each loss alone and the stock optimizers, at the same weights for all losses or one
loss after the other.
"""

import copy

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, jit, nn, ops
from support.gan_networks import ClipWeights, renamed, take
from support.networks import BATCH, FEATURES, weight
from support.training import changed, state

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


def is_bookkeeping(name):
    return "loss_scale." in name or "step_counters." in name


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


class SpectralNorm(nn.Cell):
    """A layer divided by its largest singular value, whose vector each training forward moves by one iteration."""

    def __init__(self, inputs, outputs, seed):
        super().__init__()
        self.weight = weight(inputs, outputs, seed=seed, name="weight")
        self.u = Parameter(Tensor(np.ones((outputs, 1), np.float32)), name="u", requires_grad=False)

    def construct(self, x):
        matrix = ops.stop_gradient(self.weight)
        v = ops.matmul(matrix, self.u)
        v = v / ops.sqrt(ops.square(v).sum())
        u = ops.matmul(matrix.T, v)
        u = u / ops.sqrt(ops.square(u).sum())
        if self.training:
            ops.assign(self.u, u)
        sigma = ops.matmul(ops.matmul(v.T, self.weight), u)
        return ops.matmul(x, self.weight / sigma)


class SpectralDiscriminator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.hidden = SpectralNorm(FEATURES, 4, seed=1)
        self.score = SpectralNorm(4, 1, seed=2)

    def construct(self, samples):
        return self.score(ops.tanh(self.hidden(samples)))


class HingeGeneratorLoss(nn.Cell):
    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator

    def construct(self, noise, gain):
        return -self.discriminator(self.generator(noise)).mean() * gain


class HingeDiscriminatorLoss(nn.Cell):
    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator

    def construct(self, real, noise, gain):
        fake = self.discriminator(ops.stop_gradient(self.generator(noise)))
        return (ops.relu(1.0 - self.discriminator(real)) + ops.relu(1.0 + fake)).mean() * gain


@BOTH
class TestSpectralNorm:
    """A Parameter that the user's own cell writes in each training forward, given as `forward_state`."""

    POSITIONS = ((1, 2), (0, 1, 2))

    def test_trains_and_a_skipped_step_undoes_the_forward(self, mode, make):
        generator, discriminator = self.networks()
        cell = make(
            self.losses(generator, discriminator),
            adams(generator, discriminator),
            DynamicLossScale(2.0**10),
            network_inputs=self.POSITIONS,
            forward_state=[discriminator.hidden.u, discriminator.score.u],
        ).set_train()
        before = state(cell)
        cell(*data(overflow=True))
        after = state(cell)
        moved = changed(before, after)
        assert not {name for name in moved if not name.startswith("alternation.") and not is_bookkeeping(name)}

        batches = [data(seed=1), data(seed=2)]
        for inputs in batches:
            cell(*inputs)
        assert "discriminator.hidden.u" in changed(before, state(cell))
        expected = self.networks()
        train_by_hand(make, self.losses(*expected), adams(*expected), self.POSITIONS, batches)
        assert not changed(weights(generator, discriminator), weights(*expected))

    @staticmethod
    def networks():
        generator = renamed("generator.", Matrix(NOISE, FEATURES, seed=0))
        discriminator = renamed("discriminator.", SpectralDiscriminator())
        return generator.set_train(), discriminator.set_train()

    @staticmethod
    def losses(generator, discriminator):
        return [HingeGeneratorLoss(generator, discriminator), HingeDiscriminatorLoss(generator, discriminator)]


class PenalisedDiscriminatorLoss(nn.Cell):
    """Wasserstein with gradient penalty: the loss holds a gradient by the samples, so training takes a second one."""

    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator
        self.gradient = ops.GradOperation()(discriminator)

    @jit
    def construct(self, real, noise, gain):
        fake = ops.stop_gradient(self.generator(noise))
        between = 0.25 * real + 0.75 * fake
        norm = ops.sqrt(ops.square(self.gradient(between)).sum(axis=1))
        penalty = ops.square(norm - 1.0).mean()
        return (self.discriminator(fake).mean() - self.discriminator(real).mean() + 10.0 * penalty) * gain


class SmoothDiscriminator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.hidden = Matrix(FEATURES, 4, seed=1)
        self.score = Matrix(4, 1, seed=2)

    def construct(self, samples):
        return self.score(ops.tanh(self.hidden(samples)))


def sharing(network):
    """Another cell with the very same Parameters."""
    other = copy.deepcopy(network)
    for cell, (_, copied) in zip((cell for _, cell in network.cells_and_names()), other.cells_and_names()):
        for name, parameter in cell.parameters_and_names(expand=False):
            setattr(copied, name, parameter)
    return other


def by_finite_differences(loss, parameter, inputs, step=2.0**-7):
    """The gradient of a loss, from the loss alone."""
    value = parameter.asnumpy().copy()
    gradient = np.zeros(value.shape)
    for index in np.ndindex(*value.shape):
        losses = []
        for direction in (step, -step):
            moved = value.copy()
            moved[index] += direction
            ops.assign(parameter, Tensor(moved))
            losses.append(float(loss(*inputs).asnumpy()))
        gradient[index] = (losses[0] - losses[1]) / (2 * step)
    ops.assign(parameter, Tensor(value))
    return gradient


class TestGradientPenalty:
    """
    Second derivatives, of which MindSpore has two limits, with its own training cells too. In PyNative mode it drops
    them in silence unless the loss is compiled, hence the `jit` above. In graph mode it can't differentiate by a cell
    twice in one function and once in another: the loss with the penalty gets a discriminator cell of its own, with the
    same Parameters, or both losses are one tuple.
    """

    @pytest.mark.parametrize("form", ["simultaneous", "tuple", "alternating"])
    def test_trains(self, mode, form):
        generator, discriminator = self.networks()
        losses = self.losses(generator, discriminator)
        optimizers = [nn.SGD(network.trainable_params(), learning_rate=0.5) for network in (generator, discriminator)]
        if form == "tuple":
            cell = SimultaneousTrainOneStepCell(BothLosses(*losses), optimizers, DynamicLossScale(2.0**10))
        else:
            make = SimultaneousTrainOneStepCell if form == "simultaneous" else AlternatingTrainOneStepCell
            cell = make(losses, optimizers, DynamicLossScale(2.0**10), network_inputs=[(1, 2), (0, 1, 2)])
        cell.set_train()
        before = weights(generator, discriminator)
        cell(*data(overflow=True))
        assert not changed(before, weights(generator, discriminator))
        cell(*data())

        other_generator, other_discriminator = self.networks()
        loss = self.losses(other_generator, other_discriminator)[1]
        if form == "alternating":
            # The discriminator sees the generator's new weights.
            ops.assign(other_generator.weight, generator.weight)
        for trained, initial in zip(discriminator.trainable_params(), other_discriminator.trainable_params()):
            moved = initial.asnumpy() - trained.asnumpy()
            gradient = by_finite_differences(loss, initial, data())
            # Gradients are of the order of 10, and of 0.1 without the penalty. The differences' error is of step**2.
            np.testing.assert_allclose(moved, 0.5 * gradient, rtol=1e-2, atol=1e-2)

    @staticmethod
    def networks():
        generator = renamed("generator.", Matrix(NOISE, FEATURES, seed=0))
        return generator, renamed("discriminator.", SmoothDiscriminator())

    @staticmethod
    def losses(generator, discriminator):
        return [
            HingeGeneratorLoss(generator, discriminator),
            PenalisedDiscriminatorLoss(generator, sharing(discriminator)),
        ]


class BothLosses(nn.Cell):
    def __init__(self, generator_loss, discriminator_loss):
        super().__init__(auto_prefix=False)
        self.generator_loss, self.discriminator_loss = generator_loss, discriminator_loss

    def construct(self, real, noise, gain):
        return self.generator_loss(noise, gain), self.discriminator_loss(real, noise, gain)
