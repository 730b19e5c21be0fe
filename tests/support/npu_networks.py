"""Networks on the emulated NPU whose overflows a test can choose."""

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import emulation
from support.networks import FEATURES, batch, weight

LOSS_SCALE = 2.0**4
LEARNING_RATE = 0.5

# (x, backward_gain) for one network. The forward computes x * weight, the backward LOSS_SCALE * backward_gain.
INNOCENT = (2.0, 1.0)
FORWARD = (1e6, 1.0)
BACKWARD = (2.0, 1e6)
BOTH = (1e6, 1e6)
NAN = (float("nan"), 1.0)


class OnNpu(nn.Cell):
    """The loss `backward_gain * min(saturate(x * weight), 100)`.

    If the forward overflows, the minimum makes the gradient 0, and only the register shows it. If the backward
    overflows, the gradient is 65504 * x / LOSS_SCALE, as finite as any other."""

    def __init__(self, name):
        super().__init__()
        self.weight = Parameter(Tensor([1.0], mindspore.float32), name=f"{name}.weight")
        self.saturate = emulation.Saturate(name)

    def construct(self, x, backward_gain):
        return ops.minimum(self.saturate(x * self.weight), 100.0) * backward_gain


class AllOnNpu(nn.Cell):  # The losses of several networks, as one tuple. Each takes the next two inputs.
    def __init__(self, *networks):
        super().__init__(auto_prefix=False)
        self.networks = nn.CellList(list(networks), auto_prefix=False)

    def construct(self, *inputs):
        losses = ()
        for i, network in enumerate(self.networks):
            losses += (network(inputs[2 * i], inputs[2 * i + 1]),)
        return losses


def networks_on_npu(count):
    return [OnNpu(f"network_{i}") for i in range(count)]


def optimizers_of(networks):
    return [nn.SGD(network.trainable_params(), learning_rate=LEARNING_RATE) for network in networks]


def inputs_for(*behaviours):  # Inputs with which each network behaves as given.
    return [Tensor(np.float32([value])) for behaviour in behaviours for value in behaviour]


def weights_of(networks):
    return [float(network.weight.asnumpy()[0]) for network in networks]


def reset(networks):  # Sets the weights to 1, where `updated` starts.
    for network in networks:
        ops.assign(network.weight, Tensor([1.0], mindspore.float32))
    assert weights_of(networks) == [1.0] * len(networks)


def updated(behaviour):  # The weight after one step of SGD from 1, for a behaviour without overflow.
    x, backward_gain = behaviour
    return 1.0 - LEARNING_RATE * x * backward_gain


class Saturating(nn.Cell):
    """A linear model that computes as an NPU in saturation mode does: no tensor shows an overflow."""

    def __init__(self, name, seed=0):
        super().__init__(auto_prefix=False)
        self.weight = weight(FEATURES, 1, seed=seed, name=f"{name}.weight")
        self.saturate = emulation.Saturate(name)

    def construct(self, x, y):
        return ops.square(self.saturate(ops.matmul(x, self.weight)) - y).mean()


def saturating_batch(overflow, seed):
    """A batch whose products leave the range of float16, and whose saturated gradients are finite."""
    x, y = batch(seed)
    if overflow:
        x = Tensor(x.asnumpy() * np.float32(1e8))
    return x, y
