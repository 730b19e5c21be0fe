"""The critic of a Wasserstein GAN with gradient penalty (Gulrajani et al., arXiv 1704.00028), and the losses."""

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.common.initializer import HeNormal, initializer

from ms_lossscale import InputGradient

_PENALTY = 10.0


class Critic(nn.Cell):
    """
    Scores digits. It has no BatchNorm, since the penalty is on the gradient of each image's own score. It has no ELU,
    since MindSpore has no second derivative of it.

    Args:
        filters (int): Channels of the first layer; each further one has twice as many.

    Inputs:
        - **images** (Tensor) - From -1 to 1, of shape :math:`(N, 1, 28, 28)`.

    Outputs:
        Tensor, a score for each image, of shape :math:`(N,)`.
    """

    def __init__(self, filters):
        super().__init__()
        self.down1 = _down(1, filters, 4)
        self.down2 = _down(filters, 2 * filters, 4)
        self.down3 = _down(2 * filters, 4 * filters, 3)
        # With the paper's LeakyReLU, a step in float16 on CPU takes twice as long.
        self.activation = nn.ReLU()
        self.flatten = nn.Flatten()
        self.judge = nn.Dense(4 * filters * 4 * 4, 1)

    def construct(self, images):
        x = self.activation(self.down1(images))
        x = self.activation(self.down2(x))
        x = self.activation(self.down3(x))
        return self.judge(self.flatten(x)).reshape((-1,))


def _down(inputs, outputs, kernel_size):
    layer = nn.Conv2d(inputs, outputs, kernel_size, stride=2, pad_mode="pad", padding=1, has_bias=True)
    # Without BatchNorm, nothing compensates for small weights.
    layer.weight.set_data(initializer(HeNormal(), layer.weight.shape, layer.weight.dtype))
    return layer


def _mean(scores):
    """Returns the mean in float32, since the difference of two means matters."""
    return scores.astype(mstype.float32).mean()


class GradientPenalty(nn.Cell):
    """
    Penalizes gradients of the critic whose norm is not 1, at points between real digits and drawn ones.

    Args:
        critic (Cell): The critic.
        loss_scale (Union[LossScale, None]): The same object as the loss scale of the critic's loss.
    """

    def __init__(self, critic, loss_scale):
        super().__init__(auto_prefix=False)
        self.slope = InputGradient(critic, loss_scale)

    def construct(self, real, fake, mix):
        fake = ops.stop_gradient(fake).astype(mstype.float32)
        slopes = self.slope(mix * real + (1 - mix) * fake)
        # The square root has no derivative at 0.
        norms = ops.sqrt(ops.square(slopes).sum((1, 2, 3)) + 1e-12)
        return _PENALTY * ops.square(norms - 1).mean()


class CriticLoss(nn.Cell):
    """
    The critic's loss for a batch of digits and one of noise. The penalty is taken between a real digit, where `mix` is
    1, and a drawn one, where it is 0.
    """

    def __init__(self, generator, critic, penalty):
        super().__init__(auto_prefix=False)
        self.generator = generator
        self.critic = critic
        self.penalty = penalty

    def construct(self, images, noise, mix):
        fake = ops.stop_gradient(self.generator(noise))
        return _mean(self.critic(fake)) - _mean(self.critic(images)) + self.penalty(images, fake, mix)


class GeneratorLoss(nn.Cell):
    """The generator's loss for a batch of noise."""

    def __init__(self, generator, critic):
        super().__init__(auto_prefix=False)
        self.generator = generator
        self.critic = critic

    def construct(self, noise):
        return -_mean(self.critic(self.generator(noise)))


class BothLosses(CriticLoss):
    """The critic's loss and the generator's, from the same drawn digits, as in `network.BothLosses`."""

    def construct(self, images, noise, mix):
        fake = self.generator(noise)
        fake_score = _mean(self.critic(fake))
        critic_loss = fake_score - _mean(self.critic(images)) + self.penalty(images, fake, mix)
        return critic_loss, -fake_score
