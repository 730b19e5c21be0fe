"""A small DCGAN for 28x28 grey images, and its losses."""

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.common.initializer import Normal, initializer


def _initialize(network):
    """Initializes as Radford et al., `Unsupervised representation learning with deep convolutional GANs`."""
    for _, cell in network.cells_and_names():
        if isinstance(cell, (nn.Conv2d, nn.Conv2dTranspose, nn.Dense)):
            cell.weight.set_data(initializer(Normal(0.02), cell.weight.shape, cell.weight.dtype))


class Generator(nn.Cell):
    """
    Draws digits.

    Args:
        latent (int): The number of values from which a digit is drawn.
        filters (int): Channels of the last hidden layer; each layer before has twice as many as the next.

    Inputs:
        - **noise** (Tensor) - Standard normal, of shape :math:`(N, latent)`.

    Outputs:
        Tensor, images from -1 to 1, of shape :math:`(N, 1, 28, 28)`.
    """

    def __init__(self, latent, filters):
        super().__init__()
        self.project = nn.Dense(latent, 4 * filters * 4 * 4, has_bias=False)
        self.norm1 = nn.BatchNorm2d(4 * filters)
        self.up1 = nn.Conv2dTranspose(4 * filters, 2 * filters, kernel_size=3, stride=2, pad_mode="pad", padding=1)
        self.norm2 = nn.BatchNorm2d(2 * filters)
        self.up2 = nn.Conv2dTranspose(2 * filters, filters, kernel_size=4, stride=2, pad_mode="pad", padding=1)
        self.norm3 = nn.BatchNorm2d(filters)
        self.up3 = nn.Conv2dTranspose(filters, 1, kernel_size=4, stride=2, pad_mode="pad", padding=1, has_bias=True)
        self.relu = nn.ReLU()
        self.tanh = nn.Tanh()
        self._shape = (-1, 4 * filters, 4, 4)
        _initialize(self)

    def construct(self, noise):
        x = self.project(noise).reshape(self._shape)
        x = self.relu(self.norm1(x))
        x = self.relu(self.norm2(self.up1(x)))
        x = self.relu(self.norm3(self.up2(x)))
        return self.tanh(self.up3(x))


class Discriminator(nn.Cell):
    """
    Tells real digits from drawn ones.

    Args:
        filters (int): Channels of the first layer; each further one has twice as many.

    Inputs:
        - **images** (Tensor) - From -1 to 1, of shape :math:`(N, 1, 28, 28)`.

    Outputs:
        Tensor, for each image the logit of the probability that it is real, of shape :math:`(N,)`.
    """

    def __init__(self, filters):
        super().__init__()
        self.down1 = nn.Conv2d(1, filters, kernel_size=4, stride=2, pad_mode="pad", padding=1, has_bias=True)
        self.down2 = nn.Conv2d(filters, 2 * filters, kernel_size=4, stride=2, pad_mode="pad", padding=1)
        self.norm2 = nn.BatchNorm2d(2 * filters)
        self.down3 = nn.Conv2d(2 * filters, 4 * filters, kernel_size=3, stride=2, pad_mode="pad", padding=1)
        self.norm3 = nn.BatchNorm2d(4 * filters)
        # The usual LeakyReLU(0.2) learns just as well, but takes twice as long in float16 on CPU.
        self.activation = nn.ELU()
        self.flatten = nn.Flatten()
        self.judge = nn.Dense(4 * filters * 4 * 4, 1)
        _initialize(self)

    def construct(self, images):
        x = self.activation(self.down1(images))
        x = self.activation(self.norm2(self.down2(x)))
        x = self.activation(self.norm3(self.down3(x)))
        return self.judge(self.flatten(x)).reshape((-1,))


def _mean_softplus(logits):
    """Returns the cross-entropy from logits. A float16 sigmoid could be exactly 0 or 1, its logarithm infinite."""
    return ops.softplus(logits.astype(mstype.float32)).mean()


def generator_loss(fake_logits):
    """Returns a loss that is small if the discriminator takes the drawn digits for real ones."""
    return _mean_softplus(-fake_logits)


def discriminator_loss(real_logits, fake_logits):
    """Returns a loss that is small if it tells them apart. Real digits count 90 %, so that it is never too certain."""
    real_loss = 0.9 * _mean_softplus(-real_logits) + 0.1 * _mean_softplus(real_logits)
    return real_loss + _mean_softplus(fake_logits)


class DiscriminatorLoss(nn.Cell):
    """The discriminator's loss for a batch of digits and one of noise."""

    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator = generator
        self.discriminator = discriminator

    def construct(self, images, noise):
        fake = ops.stop_gradient(self.generator(noise))
        return discriminator_loss(self.discriminator(images), self.discriminator(fake))


class GeneratorLoss(nn.Cell):
    """The generator's loss for a batch of noise."""

    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator = generator
        self.discriminator = discriminator

    def construct(self, noise):
        return generator_loss(self.discriminator(self.generator(noise)))


class BothLosses(nn.Cell):
    """
    The discriminator's loss and the generator's, from one forward of each network on the same drawn digits.

    It needs no `stop_gradient`: in the training cell, each loss only reaches the weights of its own optimizer.
    """

    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator = generator
        self.discriminator = discriminator

    def construct(self, images, noise):
        real_logits = self.discriminator(images)
        fake_logits = self.discriminator(self.generator(noise))
        return discriminator_loss(real_logits, fake_logits), generator_loss(fake_logits)
