"""The cells with all features whose checkpoints are in tests/golden/, as versions 0.1.0, 0.2.0 and 0.3.0 of the package
saved them: NAME.npz between two cycles, NAME.ckpt within one. Users of these versions have such files."""

import functools

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import ms_lossscale as ls

STEPS = 3
# Positions among the inputs first_x, second_x and samples.
NETWORK_INPUTS = [(0, 2), (1, 2)]
LEARNING_RATES = [0.5, 0.25, 0.125, 0.25, 0.5, 0.125]


class Linear(nn.Cell):  # The sum of `weight * x`, with a BatchNorm on separate samples, only for its statistics.
    def __init__(self, name, weight):
        super().__init__(auto_prefix=False)
        self.weight = Parameter(Tensor(weight, mindspore.float32), name=f"{name}.weight")
        self.norm = nn.BatchNorm1d(2, momentum=0.5)
        self.norm.update_parameters_name(f"{name}.norm.")

    def construct(self, x, samples):
        return ops.depend((self.weight * x).sum(), self.norm(samples))


class Remembering(Linear):  # Writes a Parameter of its own, too, and has a frozen one that it only reads.
    def __init__(self, name, weight):
        super().__init__(name, weight)
        self.seen = Parameter(Tensor([0.0, 0.0], mindspore.float32), name=f"{name}.seen", requires_grad=False)
        self.gain = Parameter(Tensor([1.0, 1.0], mindspore.float32), name=f"{name}.gain", requires_grad=False)

    def construct(self, x, samples):
        ops.assign(self.seen, 0.5 * self.seen + samples[0])
        return ops.depend((self.weight * self.gain * x).sum(), self.norm(samples))


class SeesFirst(Linear):  # The sum of `(weight + first.weight) * x`, with such a BatchNorm.
    def __init__(self, name, weight, first):
        super().__init__(name, weight)
        self.first = first

    def construct(self, x, samples):
        return ops.depend(((self.weight + self.first.weight) * x).sum(), self.norm(samples))


class RemembersForFirst(SeesFirst):  # Writes what the first network remembers, too.
    def construct(self, x, samples):
        ops.assign(self.first.seen, 0.5 * self.first.seen + samples[1])
        return ops.depend(((self.weight + self.first.weight) * x).sum(), self.norm(samples))


class BothLosses(nn.Cell):  # The losses of both networks as a tuple.
    def __init__(self, first, second):
        super().__init__(auto_prefix=False)
        self.first, self.second = first, second

    def construct(self, first_x, second_x, samples):
        return self.first(first_x, samples), self.second(second_x, samples)


def momentum(network):
    return nn.Momentum([network.weight], learning_rate=LEARNING_RATES, momentum=0.5)


def adam(network):
    return nn.Adam([network.weight], learning_rate=LEARNING_RATES, beta1=0.5, beta2=0.5, eps=2.0**-10)


def rule(hysteresis=1):
    return ls.DynamicLossScale(2.0**10, scale_window=2, hysteresis=hysteresis)


def scaled(optimizer, hysteresis=1, make=Linear, **keywords):
    network = make("first", np.array([-3.0, -6.0]))
    keywords.update(gradient_accumulation_steps=STEPS, ema_decay=0.5)
    return ls.ScaledTrainOneStepCell(network, optimizer(network), rule(hysteresis), **keywords)


def pair(cell_class, first_class=Linear, second_class=SeesFirst, loss_scale=None, **keywords):
    first = first_class("first", np.array([-3.0, -6.0]))
    second = second_class("second", np.array([-1.5, 0.75]), first)
    networks = BothLosses(first, second) if "as_tuple" in keywords else [first, second]
    if not keywords.pop("as_tuple", False):
        keywords["network_inputs"] = NETWORK_INPUTS
    keywords.update(clip_norm=[10.0, None], clip_value=[None, 1.0], gradient_accumulation_steps=STEPS, ema_decay=0.5)
    return cell_class(networks, [momentum(first), adam(second)], loss_scale or rule(), **keywords)


def own_scales():
    return pair(ls.SimultaneousTrainOneStepCell, Remembering, loss_scale=[rule(), rule(hysteresis=2)], max_retries=1)


# What makes the cell, by the first release that had it. Weights differ from those that were saved.
OF_0_1 = {
    "scaled_momentum": lambda: scaled(momentum, clip_norm=10.0),
    "scaled_adam": lambda: scaled(adam, hysteresis=2, clip_value=1.0),
    "simultaneous": lambda: pair(ls.SimultaneousTrainOneStepCell),
    "simultaneous_tuple": lambda: pair(ls.SimultaneousTrainOneStepCell, as_tuple=True),
    "alternating": lambda: pair(ls.AlternatingTrainOneStepCell, every=(1, 2)),
}
retried = functools.partial(scaled, momentum, make=Remembering, clip_value=1.0, max_retries=1)
sharing = functools.partial(pair, ls.AlternatingTrainOneStepCell, Remembering, RemembersForFirst, every=(1, 2))
OF_0_2, OF_0_3 = {"retried": retried, "own_scales": own_scales}, {"sharing": sharing, "set_by_hand": own_scales}
CELLS = {**OF_0_1, **OF_0_2, **OF_0_3}
RELEASES = {"0_1": OF_0_1, "0_2": OF_0_2, "0_3": CELLS}


def train(cell, first=0, last=2 * STEPS):  # Makes two cycles, or these calls. Returns what they returned.
    returned = []
    for call in range(first, last):
        size = 2.0 ** (call % 3 - 2)
        arrays = [size * np.array([9.0, 12.0]), size * np.array([3.0, -6.0]), np.array([[call, 1.0], [-1.0, call]])]
        inputs = [Tensor(array, mindspore.float32) for array in arrays]
        outputs = cell(*(inputs[::2] if isinstance(cell, ls.ScaledTrainOneStepCell) else inputs))
        returned += [output.asnumpy() for output in outputs]
    return returned
