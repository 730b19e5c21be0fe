"""What is done to the gradients between the backward and the optimizer is a list that can grow: here by noise."""

import dataclasses

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.networks import Linear, Mlp, batch, overflowing_batch
from support.training import state

from ms_lossscale import DynamicLossScale
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.step.gradient_transforms import GradientTransform
from ms_lossscale.step.settings import check_settings

RATE = 0.5
NOISE = 0.25


class GradientNoise(GradientTransform):
    """Adds the same number to each gradient."""

    def __init__(self, noise):
        super().__init__()
        self.noise = Tensor(noise, mindspore.float32)

    def construct(self, grads):
        noisy = ()
        for grad in grads:
            noisy += (grad + self.noise,)
        return noisy


class CountsLargest(GradientTransform):
    """Measures the largest gradient before the verdict, and counts how often it is applied."""

    def __init__(self):
        super().__init__()
        self.largest = Parameter(Tensor(0.0, mindspore.float32), name="largest", requires_grad=False)
        self.applied = Parameter(Tensor(0, mindspore.int32), name="applied", requires_grad=False)
        self.one = Tensor(1, mindspore.int32)

    def measure(self, grads, divisor):
        largest = ops.ReduceMax()(ops.abs(grads[0]))
        for grad in grads[1:]:
            largest = ops.maximum(largest, ops.ReduceMax()(ops.abs(grad)))
        ops.assign(self.largest, largest / divisor)
        return ()

    def construct(self, grads):
        ops.assign(self.applied, self.applied + self.one)
        return grads


class NoisyTrainOneStepCell(TrainingCell):
    """One network, whose gradients are noisy."""

    def __init__(self, network, transforms, **keywords):
        defaults = {"gradient_accumulation_steps": 1, "clip_norm": None, "clip_value": None, "ema_decay": None}
        defaults.update(has_aux=False, forward_state=(), after_update=None, overflow_detector=None, max_retries=0)
        settings = check_settings("NoisyTrainOneStepCell", 1, **{**defaults, **keywords})
        settings = dataclasses.replace(settings, gradient_transforms=tuple(transforms))
        optimizer = nn.SGD(network.trainable_params(), RATE)
        super().__init__((network,), (optimizer,), [DynamicLossScale()], [settings], several_networks=False)

    def construct(self, *inputs):
        step = self.steps[0](*inputs)
        return step[0][0], step[2], step[3]


def moved(transforms, network=Linear, calls=1, **keywords):
    """By how much `calls` calls on one batch have moved the weights, and the cell."""
    network = network()
    before = [weight.asnumpy().copy() for weight in network.trainable_params()]
    cell = NoisyTrainOneStepCell(network, transforms, **keywords).set_train()
    for _ in range(calls):
        cell(*batch())
    return [weight.asnumpy() - first for weight, first in zip(network.trainable_params(), before)], cell


@pytest.mark.parametrize(
    "keywords",
    [{}, {"clip_norm": 0.5, "gradient_accumulation_steps": 2}, {"clip_norm": float("inf")}, {"clip_value": 0.125}],
    ids=str,
)
def test_comes_after_clipping_and_before_the_optimizer(mode, keywords):
    calls = keywords.get("gradient_accumulation_steps", 1)
    quiet, _ = moved([], Mlp, calls, **keywords)
    noisy, cell = moved([GradientNoise(NOISE)], Mlp, calls, **keywords)
    for its, other in zip(noisy, quiet):
        np.testing.assert_allclose(its, other - RATE * NOISE, rtol=1e-5, atol=1e-6)
    assert cell.counters()["applied_steps"] == 1


def test_two_of_them_come_in_their_order(mode):
    class Doubled(GradientTransform):
        def construct(self, grads):
            doubled = ()
            for grad in grads:
                doubled += (grad + grad,)
            return doubled

    quiet, _ = moved([])
    noisy, _ = moved([GradientNoise(NOISE), Doubled()])
    np.testing.assert_allclose(noisy[0], 2 * (quiet[0] - RATE * NOISE), rtol=1e-5, atol=1e-6)


def test_measures_before_the_verdict_and_is_applied_in_the_clean_branch(mode):
    changes, cell = moved([CountsLargest()])
    first = state(cell)
    np.testing.assert_allclose(first["largest"], np.abs(changes[0] / RATE).max(), rtol=1e-5)
    assert first["applied"] == 1
    assert bool(cell(*overflowing_batch())[1])
    second = state(cell)
    assert second["largest"] != first["largest"]
    assert second["applied"] == 1
    assert second["weight"].tobytes() == first["weight"].tobytes()


def test_is_part_of_what_ranks_compare():
    _, cell = moved([GradientNoise(NOISE)])
    assert cell._settings[0].described()["gradient_transforms"] == ["GradientNoise"]
