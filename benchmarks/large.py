"""Networks of the size that GPUs and NPUs are made for, in float16 with float32 weights, each with a batch."""

import gan.network
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

rng = np.random.default_rng(0)


def normal(*shape):
    return Tensor(rng.standard_normal(shape).astype(np.float32))


def numbers(below, *shape):
    return Tensor(rng.integers(0, below, shape).astype(np.int32))


class Classifier(nn.Cell):
    """A network that computes in float16, and the cross-entropy of what it returns, in float32."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network.to_float(mstype.float16)

    def construct(self, x, labels):
        return ops.cross_entropy(self.network(x).astype(mstype.float32), labels)


def convolution(channels_in, channels, size=1, stride=1):
    layer = nn.Conv2d(channels_in, channels, size, stride, pad_mode="pad", padding=size // 2)
    return nn.SequentialCell(layer, nn.BatchNorm2d(channels))


class Bottleneck(nn.Cell):
    def __init__(self, channels_in, width, channels, stride):
        super().__init__()
        self.reduce, self.expand = convolution(channels_in, width), convolution(width, channels)
        self.transform = convolution(width, width, 3, stride)
        self.shortcut = nn.Identity() if channels == channels_in else convolution(channels_in, channels, 1, stride)
        # Each block begins as its shortcut, so that no activation grows with the depth.
        self.expand[1].gamma.set_data(ops.zeros_like(self.expand[1].gamma))

    def construct(self, x):
        hidden = ops.relu(self.transform(ops.relu(self.reduce(x))))
        return ops.relu(self.expand(hidden) + self.shortcut(x))


def resnet50(batch_size=64, side=224, blocks=(3, 4, 6, 3)):
    """
    ResNet-50 (He et al., `Deep residual learning for image recognition`), batch 64 of 224x224 images: 161 parameter
    tensors, 26 million values.
    """
    layers, channels = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, pad_mode="same")], 64
    for i, count in enumerate(blocks):
        width = 64 * 2**i
        for j in range(count):
            layers.append(Bottleneck(channels, width, 4 * width, 2 if i and not j else 1))
            channels = 4 * width
    layers += [nn.AvgPool2d(side // 2 ** (1 + len(blocks))), nn.Flatten(), nn.Dense(channels, 1000)]
    return Classifier(nn.SequentialCell(*layers)), (normal(batch_size, 3, side, side), numbers(1000, batch_size))


class DecoderLayer(nn.Cell):
    """A layer of a transformer in which each token sees those before it."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.heads, self.factor = heads, (width // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.up, self.down = nn.Dense(width, 4 * width, activation="gelu"), nn.Dense(4 * width, width)
        self.mask = Tensor(np.triu(np.full((length, length), -1e4, np.float16), 1))

    def construct(self, x):
        size, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(size, length, 3, self.heads, width // self.heads)
        q, k, v = ops.unstack(qkv.transpose(2, 0, 3, 1, 4))
        weights = ops.softmax(ops.matmul(q * self.factor, k.swapaxes(2, 3)) + self.mask)
        mixed = ops.matmul(weights, v).swapaxes(1, 2).reshape(size, length, width)
        x = x + self.out(mixed)
        return x + self.down(self.up(self.norm2(x)))


class Transformer(nn.Cell):
    def __init__(self, layers, width, heads, words, length):
        super().__init__()
        self.words = nn.Embedding(words, width, embedding_table="normal")
        self.places = Parameter(normal(length, width) * 0.02, name="places")
        self.layers = nn.SequentialCell(*[DecoderLayer(width, heads, length) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((width,)), nn.Dense(width, words, has_bias=False)

    def construct(self, tokens):
        hidden = self.layers((self.words(tokens) + self.places).astype(mstype.float16))
        return self.head(self.norm(hidden)).reshape(-1, self.head.out_channels)


def transformer(batch_size=8, length=512, layers=12, width=768, words=25_000):
    """A decoder of 12 layers of 768, batch 8 of 512 tokens: 149 parameter tensors, 124 million values."""
    network = Transformer(layers, width, width // 64, words, length)
    return Classifier(network), (numbers(words, batch_size, length), numbers(words, batch_size * length))


def dcgan128(batch_size=128, filters=128):
    """The GAN example's networks with 128 filters, batch 128 of images and noise."""
    networks = generator, discriminator = gan.network.Generator(64, filters), gan.network.Discriminator(filters)
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    for network in networks:
        network.to_float(mstype.float16)
    return networks, (ops.tanh(normal(batch_size, 1, 28, 28)), normal(batch_size, 64))
