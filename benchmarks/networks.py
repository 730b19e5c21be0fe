"""The networks of the benchmarks, each with a batch of its inputs."""

import base  # noqa: F401
import gan.network
import numpy as np
from common.lenet5 import LeNet5
from mindspore import Tensor, nn, ops


def _classified(network, shape, batch_size=32):
    rng = np.random.default_rng(0)
    images = Tensor(rng.standard_normal((batch_size, *shape)).astype(np.float32))
    labels = Tensor(rng.integers(0, 10, batch_size).astype(np.int32))
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.WithLossCell(network, loss), (images, labels)


def small_convolutions():
    """LeNet-5 on 28x28 images: 10 parameter tensors, 44 thousand values."""
    return _classified(LeNet5(), (1, 28, 28))


def tiny():
    """Layers of 4 and 1: 4 parameter tensors, 25 values. Its step shows MindSpore's fixed cost, and what is added."""
    rng = np.random.default_rng(0)
    layers = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 1))
    inputs = [Tensor(rng.standard_normal((8, size)).astype(np.float32)) for size in (4, 1)]
    return nn.WithLossCell(layers, nn.MSELoss()), inputs


def mlp():
    """7 layers of 1024: 14 parameter tensors, 6.3 million values."""
    layers = []
    for _ in range(6):
        layers += [nn.Dense(1024, 1024), nn.ReLU()]
    return _classified(nn.SequentialCell(*layers, nn.Dense(1024, 10)), (1024,))


class _Narrow(nn.Cell):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(8, 8) for _ in range(layers - 1)])
        self.classify = nn.Dense(8, 10)

    def construct(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return self.classify(x)


def deep_narrow():
    """250 layers of 8: 500 small parameter tensors."""
    return _classified(_Narrow(250), (8,))


class _Block(nn.Cell):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, pad_mode="pad", padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, pad_mode="pad", padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.SequentialCell(
                nn.Conv2d(channels_in, channels, 1, stride, pad_mode="valid"), nn.BatchNorm2d(channels)
            )

    def construct(self, x):
        y = ops.relu(self.norm1(self.conv1(x)))
        return ops.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class _ResNet(nn.Cell):
    """He et al., `Deep residual learning for image recognition`, with the usual first layer for 32x32 images."""

    def __init__(self, blocks_of_stages, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, pad_mode="pad", padding=1)
        self.norm = nn.BatchNorm2d(width)
        blocks, channels_in = [], width
        for stage, count in enumerate(blocks_of_stages):
            channels = width * 2**stage
            for i in range(count):
                blocks.append(_Block(channels_in, channels, 2 if stage and i == 0 else 1))
                channels_in = channels
        self.blocks = nn.SequentialCell(*blocks)
        self.classify = nn.Dense(channels_in, 10)

    def construct(self, images):
        x = self.blocks(ops.relu(self.norm(self.conv(images))))
        return self.classify(x.mean(axis=(2, 3)))


def resnet18():
    """ResNet-18 on 32x32 images, batch 8: 62 parameter tensors, 11 million values."""
    return _classified(_ResNet((2, 2, 2, 2), 64), (3, 32, 32), batch_size=8)


def narrow_resnet18():
    """The same, a quarter as wide, batch 16."""
    return _classified(_ResNet((2, 2, 2, 2), 16), (3, 32, 32), batch_size=16)


def narrow_resnet34():
    """ResNet-34, a quarter as wide, on 32x32 images, batch 16: 110 parameter tensors."""
    return _classified(_ResNet((3, 4, 6, 3), 16), (3, 32, 32), batch_size=16)


class _Encoder(nn.Cell):
    def __init__(self, layers, width):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.classify = nn.Dense(width, 10)

    def construct(self, x):
        return self.classify(self.encoder(x).mean(axis=1))


def transformer():
    """A transformer encoder of 12 layers of 64, 16 vectors a sequence, batch 8: 146 parameter tensors."""
    return _classified(_Encoder(12, 64), (16, 64), batch_size=8)


def dcgan():
    """The generator and the discriminator of the GAN example, and a batch of images and noise."""
    generator, discriminator = gan.network.Generator(64, 24), gan.network.Discriminator(24)
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    rng = np.random.default_rng(0)
    images = Tensor(rng.uniform(-1, 1, (32, 1, 28, 28)).astype(np.float32))
    noise = Tensor(rng.standard_normal((32, 64)).astype(np.float32))
    return generator, discriminator, (images, noise)


ONE_NETWORK = {
    "tiny": tiny,
    "lenet": small_convolutions,
    "mlp": mlp,
    "deep_narrow": deep_narrow,
    "resnet18": resnet18,
    "narrow_resnet18": narrow_resnet18,
    "narrow_resnet34": narrow_resnet34,
    "transformer": transformer,
}
