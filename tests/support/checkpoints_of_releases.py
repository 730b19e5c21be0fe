"""
Cells with all features, and the program that wrote tests/golden/checkpoints_0_1/ with version 0.1.0 of the package,
tests/golden/checkpoints_0_2/ with version 0.2.0, and tests/golden/checkpoints_0_3/ with version 0.3.0:

    python checkpoints_of_releases.py MODE FOLDER CASE [CASE ...]

For each case it trains up to the middle of a cycle, writes FOLDER/CASE.ckpt, goes on, and writes the calls' results and
all Parameters to FOLDER/CASE.npz. Users of these versions have such files, so they must not be rewritten.

All numbers are the same on every CPU, in both modes, and with MindSpore 2.7 to 2.10. Inputs, learning rates, momenta
and the scale are dyadic. A call's gradients are its inputs, three times a dyadic number, so that the mean over three
calls is exact as well. Adam's weights are not exact, but each operation is rounded once on any CPU: before an addition,
numbers are multiplied only by powers of two, and sums of rounded numbers have two terms.
"""

import os
import sys
import types
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)

STEPS = 3
CALLS = 6 * STEPS
# After the first call of the fourth cycle, in which the second network takes part if networks take turns.
STOP = 3 * STEPS + 1

# Positions among the inputs first_x, second_x and samples.
NETWORK_INPUTS = [(0, 2), (1, 2)]
# Its product with any scale of these runs overflows, but not that with a weight.
HUGE = 2.0**126
# Its product with the first scale overflows, but not that with half of it, so a retry succeeds.
LARGE = 2.0**117
LEARNING_RATES = [0.5, 0.25, 0.125, 0.25, 0.5, 0.125]


class Linear(nn.Cell):
    """The sum of `weight * x`, with a BatchNorm on separate samples, only for its statistics."""

    def __init__(self, name, weight):
        super().__init__(auto_prefix=False)
        self.weight = Parameter(Tensor(weight, mindspore.float32), name=f"{name}.weight")
        self.norm = nn.BatchNorm1d(2, momentum=0.5)
        self.norm.update_parameters_name(f"{name}.norm.")

    def construct(self, x, samples):
        return ops.depend((self.weight * x).sum(), self.norm(samples))


class Remembering(Linear):
    """Writes a Parameter of its own, too, and has a frozen one that it only reads."""

    def __init__(self, name, weight):
        super().__init__(name, weight)
        self.seen = Parameter(Tensor([0.0, 0.0], mindspore.float32), name=f"{name}.seen", requires_grad=False)
        self.gain = Parameter(Tensor([1.0, 1.0], mindspore.float32), name=f"{name}.gain", requires_grad=False)

    def construct(self, x, samples):
        ops.assign(self.seen, 0.5 * self.seen + samples[0])
        return ops.depend((self.weight * self.gain * x).sum(), self.norm(samples))


class SeesFirst(Linear):
    """The sum of `(weight + first.weight) * x`, with such a BatchNorm."""

    def __init__(self, name, weight, first):
        super().__init__(name, weight)
        self.first = first

    def construct(self, x, samples):
        return ops.depend(((self.weight + self.first.weight) * x).sum(), self.norm(samples))


class RemembersForFirst(SeesFirst):
    """Writes what the first network remembers, too."""

    def construct(self, x, samples):
        ops.assign(self.first.seen, 0.5 * self.first.seen + samples[1])
        return ops.depend(((self.weight + self.first.weight) * x).sum(), self.norm(samples))


class BothLosses(nn.Cell):
    """The losses of both networks as a tuple."""

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
    return DynamicLossScale(2.0**10, scale_window=2, hysteresis=hysteresis)


EVERYTHING = {"gradient_accumulation_steps": STEPS, "ema_decay": 0.5}
CLIPPING_OF_BOTH = {"clip_norm": [10.0, None], "clip_value": [None, 1.0]}


def first_network(start):
    return Linear("first", start * np.array([1.0, 2.0]))


def two_networks(start):
    first = first_network(start)
    return first, SeesFirst("second", start * np.array([0.5, -0.25]), first)


def scaled_momentum(start):
    network = first_network(start)
    return ScaledTrainOneStepCell(network, momentum(network), rule(), clip_norm=10.0, **EVERYTHING)


def scaled_adam(start):
    network = first_network(start)
    return ScaledTrainOneStepCell(network, adam(network), rule(hysteresis=2), clip_value=1.0, **EVERYTHING)


def simultaneous(start):
    first, second = two_networks(start)
    return SimultaneousTrainOneStepCell(
        [first, second],
        [momentum(first), adam(second)],
        rule(),
        network_inputs=NETWORK_INPUTS,
        **CLIPPING_OF_BOTH,
        **EVERYTHING,
    )


def simultaneous_tuple(start):
    first, second = two_networks(start)
    return SimultaneousTrainOneStepCell(
        BothLosses(first, second), [momentum(first), adam(second)], rule(), **CLIPPING_OF_BOTH, **EVERYTHING
    )


def alternating(start):
    first, second = two_networks(start)
    return AlternatingTrainOneStepCell(
        [first, second],
        [momentum(first), adam(second)],
        rule(),
        every=(1, 2),
        network_inputs=NETWORK_INPUTS,
        **CLIPPING_OF_BOTH,
        **EVERYTHING,
    )


def retried(start):
    network = Remembering("first", start * np.array([1.0, 2.0]))
    return ScaledTrainOneStepCell(network, momentum(network), rule(), clip_value=1.0, max_retries=1, **EVERYTHING)


def own_scales(start):
    first = Remembering("first", start * np.array([1.0, 2.0]))
    second = SeesFirst("second", start * np.array([0.5, -0.25]), first)
    return SimultaneousTrainOneStepCell(
        [first, second],
        [momentum(first), adam(second)],
        [rule(), rule(hysteresis=2)],
        network_inputs=NETWORK_INPUTS,
        max_retries=1,
        **CLIPPING_OF_BOTH,
        **EVERYTHING,
    )


def sharing(start):
    first = Remembering("first", start * np.array([1.0, 2.0]))
    second = RemembersForFirst("second", start * np.array([0.5, -0.25]), first)
    return AlternatingTrainOneStepCell(
        [first, second],
        [momentum(first), adam(second)],
        rule(),
        every=(1, 2),
        network_inputs=NETWORK_INPUTS,
        **CLIPPING_OF_BOTH,
        **EVERYTHING,
    )


class Case(NamedTuple):
    """
    A function that makes a cell, given a factor for its first weights; the networks whose gradients overflow, by call;
    those whose gradients overflow only at the first scale; and the scales that are set by hand at the stop. In each
    case, a cycle before the stop and one after it are skipped, and others are applied.
    """

    make: callable
    overflows: dict
    mended: dict = types.MappingProxyType({})
    set_scales: tuple = ()


CASES_OF_0_1 = {
    "scaled_momentum": Case(scaled_momentum, {4: (0,), 13: (0,)}),
    # Stops when one overflow of two is counted, in a cycle that has overflowed already.
    "scaled_adam": Case(scaled_adam, {8: (0,), STOP - 1: (0,), 14: (0,)}),
    "simultaneous": Case(simultaneous, {4: (1,), 13: (0, 1)}),
    "simultaneous_tuple": Case(simultaneous_tuple, {3: (0,), STOP - 1: (1,), 14: (0,)}),
    "alternating": Case(alternating, {5: (0, 1), STOP - 1: (1,), 13: (0,)}),
}
CASES_OF_0_2 = {
    "retried": Case(retried, {3: (0,), 14: (0,)}, {1: (0,), STOP: (0,)}),
    # The cycle in which training stops is skipped after the stop.
    "own_scales": Case(own_scales, {4: (1,), STOP + 1: (0,)}, {STOP - 1: (0,)}),
}
CASES_OF_0_3 = {
    # Both networks remember in the cycle in which training stops, and both are skipped at its end.
    "sharing": Case(sharing, {4: (0, 1), STOP - 1: (1,), STOP + 1: (0,), 13: (0,)}),
    # The first scale is set to what it is, and falls in the next attempt; the second one is set to another.
    "set_by_hand": Case(own_scales, {5: (1,), 13: (0,)}, {STOP: (0,)}, (2.0**11, 2.0**12)),
}
CASES = {**CASES_OF_0_1, **CASES_OF_0_2, **CASES_OF_0_3}


def build(name, start=1.0):
    return CASES[name].make(start).set_train()


def inputs(name, call):
    """Returns the inputs of a call. The norm of the first network's mean gradients is 5, 10, or 20."""
    cycle, place = divmod(call, STEPS)
    size = (-1.0) ** cycle * 2.0 ** (cycle % 3 - 2) * (1, 1, 2)[place]
    xs = [size * np.array([9.0, 12.0]), size * np.array([3.0, -6.0])]
    for i in CASES[name].overflows.get(call, ()):
        xs[i][0] = HUGE
    for i in CASES[name].mended.get(call, ()):
        xs[i][0] = LARGE
    s = call % 4
    arrays = [*xs, np.array([[s, 1.0], [-1.0, s]])]
    if name.startswith(("scaled", "retried")):
        arrays = [arrays[position] for position in NETWORK_INPUTS[0]]
    return [Tensor(array, mindspore.float32) for array in arrays]


def train(cell, name, first, last):
    """Makes the calls from `first` to before `last`. Returns their results, one array for each output."""
    calls = [[output.asnumpy() for output in cell(*inputs(name, call))] for call in range(first, last)]
    return {f"returned.{i}": np.stack(values) for i, values in enumerate(zip(*calls))}


def train_to_stop(cell, name):
    train(cell, name, 0, STOP)
    if CASES[name].set_scales:
        cell.set_loss_scale(list(CASES[name].set_scales))


def finish(cell, name):
    """Goes on from STOP to the end. Returns the calls' results and all Parameters."""
    returned = train(cell, name, STOP, CALLS)
    return {**returned, **{key: parameter.asnumpy() for key, parameter in cell.parameters_dict().items()}}


def main(mode, folder, *names):
    mindspore.set_context(mode={"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode])
    for name in names:
        cell = build(name)
        train_to_stop(cell, name)
        mindspore.save_checkpoint(cell, str(Path(folder, f"{name}.ckpt")))
        np.savez_compressed(Path(folder, f"{name}.npz"), **finish(cell, name))


if __name__ == "__main__":
    main(*sys.argv[1:])
