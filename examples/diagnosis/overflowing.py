"""A transformer and two ResNets that classify digits, and why they overflow in float16."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

CLASSES = 10
_SIZE = 28
_LARGE = 2.0**18


class MaskedSoftmax(nn.Cell):
    """A masked softmax as it is often written: 1e9 is infinite in float16, and 0 times it is NaN."""

    def construct(self, logits, mask):
        return ops.softmax(logits + (mask - 1.0) * 1e9, -1)


class Attention(nn.Cell):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Dense(width, width) for _ in range(4))
        self.softmax = MaskedSoftmax()

    def _split(self, x):
        return x.reshape(x.shape[0], -1, self.heads, self.size).swapaxes(1, 2)

    def construct(self, x, mask):
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        logits = ops.matmul(query, key.swapaxes(2, 3)) * self.size**-0.5
        x = ops.matmul(self.softmax(logits, mask).astype(value.dtype), value)
        return self.out(x.swapaxes(1, 2).reshape(x.shape[0], -1, self.heads * self.size))


class Layer(nn.Cell):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.attention = Attention(width, heads)
        self.dense1, self.dense2 = nn.Dense(width, 2 * width, activation="relu"), nn.Dense(2 * width, width)

    def construct(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.dense2(self.dense1(self.norm2(x)))


class Transformer(nn.Cell):
    """Reads an image row by row, and masks rows without ink. The mask overflows."""

    def __init__(self, depth=2, width=32, heads=4):
        super().__init__()
        self.rows = nn.Dense(_SIZE, width)
        self.position = Parameter(Tensor(np.random.default_rng(0).normal(0, 0.02, (_SIZE, width)), mstype.float32))
        self.layers = nn.CellList([Layer(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm((width,))
        self.classes = nn.Dense(width, CLASSES)

    def construct(self, images):
        rows = images.reshape(-1, _SIZE, _SIZE)
        mask = (rows.sum(-1) > 0).astype(rows.dtype).reshape(-1, 1, 1, _SIZE)
        x = self.rows(rows) + self.position
        for layer in self.layers:
            x = layer(x, mask)
        return self.classes(self.norm(x).mean(1))


class Bottleneck(nn.Cell):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(each) for each in (channels, channels, 4 * channels))
        self.relu = nn.ReLU()
        same = stride == 1 and channels_in == 4 * channels
        shortcut = [nn.Conv2d(channels_in, 4 * channels, 1, stride), nn.BatchNorm2d(4 * channels)]
        self.shortcut = nn.Identity() if same else nn.SequentialCell(shortcut)

    def construct(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _enlarge(weight):
    weight.set_data(weight * _LARGE)


class ResNet(nn.Cell):
    """
    A ResNet of bottleneck blocks; ResNet-50 has (3, 4, 6, 3). One convolution has very large weights. BatchNorm then
    divides by as much, so that it still learns in float32.
    """

    def __init__(self, depths=(1, 1), channels=8):
        super().__init__()
        self.stem = nn.SequentialCell(nn.Conv2d(1, channels, 3, 2), nn.BatchNorm2d(channels), nn.ReLU())
        blocks, channels_in = [], channels
        for stage, depth in enumerate(depths):
            for i in range(depth):
                its = channels * 2**stage
                blocks.append(Bottleneck(channels_in, its, 2 if i == 0 and stage > 0 else 1))
                channels_in = 4 * its
        self.blocks = nn.SequentialCell(blocks)
        self.classes = nn.Dense(channels_in, CLASSES)
        _enlarge(blocks[len(blocks) // 2].conv2.weight)

    def construct(self, images):
        return self.classes(self.blocks(self.stem(images)).mean((2, 3)))


def mindcv_resnet18():
    """Returns mindcv's own ResNet-18 for images of one channel, in which one convolution has very large weights."""
    from mindcv.models import create_model

    network = create_model("resnet18", num_classes=CLASSES, in_channels=1)
    _enlarge(network.layer2[0].conv2.weight)
    return network
