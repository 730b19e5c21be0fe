"""A small convolutional network with BatchNorm, and a training of it whose weights two processes compare:

python normalised_training.py DEVICE MODE DTYPE"""

import hashlib
import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# To find the package `support` when run as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


class Convolutional(nn.Cell):
    """Cross-entropy of a convolutional network. It counts its forwards; an infinite `factor` makes it overflow."""

    def __init__(self, channels=16):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, channels, 3), nn.Conv2d(channels, channels, 3)
        self.norm, self.dense = nn.BatchNorm2d(channels), nn.Dense(channels, 10)
        self.forwards = Parameter(Tensor(0, mstype.int32), name="forwards", requires_grad=False)
        self.one = Tensor(1, mstype.int32)

    def construct(self, x, labels, factor):
        ops.assign_add(self.forwards, self.one)
        hidden = ops.relu(self.second(ops.relu(self.norm(self.first(x)))))
        logits = self.dense(ops.mean(hidden, (2, 3)))
        return ops.cross_entropy(logits.astype(mstype.float32) * factor, labels)


def batch(seed, overflows=False):
    rng = np.random.default_rng(seed)
    x, labels = rng.standard_normal((16, 3, 16, 16)).astype(np.float32), rng.integers(0, 10, 16).astype(np.int32)
    return Tensor(x), Tensor(labels), Tensor(np.float32(np.inf if overflows else 1.0))


def make_cell(network, **keywords):
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()


def trained(dtype):
    """Returns a digest of all Parameters after a training."""
    mindspore.set_seed(0)
    np.random.seed(0)
    cell = make_cell(Convolutional().to_float(getattr(mstype, dtype)))
    for step in range(12):
        cell(*batch(step, step == 5))
    values = b"".join(parameter.asnumpy().tobytes() for parameter in cell.get_parameters())
    return hashlib.sha256(values).hexdigest()


if __name__ == "__main__":
    device, mode, dtype = sys.argv[1:]
    mindspore.set_context(mode={"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode])
    mindspore.set_device(device)
    print(trained(dtype))
