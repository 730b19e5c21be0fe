"""A compiled step of a ManualStep differentiates at the scale of this step, not at that of the one before."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import ParameterTuple, nn
from support.networks import BATCH, Linear, batch_for

from ms_lossscale import DynamicLossScale, ManualStep


def test_the_scale_changes_in_every_step(mode):
    network = Linear()
    optimizer = nn.SGD([network.weight], 0.1)
    step = ManualStep(network, optimizer, DynamicLossScale(2.0**10, scale_window=1))

    def forward(x, y):
        return step.scale(network(x, y))

    grad = mindspore.grad(forward, None, step.parameters)

    @mindspore.jit
    def train_step(x, y):
        x, y = step.begin(x, y)
        return step.end(grad(x, y))

    weight = network.weight.asnumpy().astype(np.float64)
    for seed, overflows in enumerate([False, False, True, True, False, False]):
        x, y = batch_for(overflows, seed)
        assert bool(train_step(x, y)) is overflows
        if not overflows:
            x, y = x.asnumpy().astype(np.float64), y.asnumpy()
            weight -= 0.1 * 2 / BATCH * x.T @ (x @ weight - y)
        # Six steps in float32, each rounded by 2**-24 a few times; the scale of the step before is off by factors.
        np.testing.assert_allclose(network.weight.asnumpy(), weight, rtol=2e-6)
    assert step.get_loss_scale() == 2.0**12


@pytest.mark.slow
def test_the_scale_within_vmap(mode):
    network = Linear()
    step = ManualStep(network, nn.SGD([network.weight], 0.1), DynamicLossScale(2.0**10, scale_window=1))

    def forward(x, y):
        return step.scale(network(x.expand_dims(0), y.expand_dims(0)))

    of_each = mindspore.vmap(mindspore.grad(forward, None, step.parameters), in_axes=(0, 0))

    @mindspore.jit
    def train_step(x, y):
        x, y = step.begin(x, y)
        (of_weight,) = of_each(x, y)
        return step.end((of_weight.mean(0),))

    weight = network.weight.asnumpy().astype(np.float64)
    for seed in range(4):
        x, y = batch_for(False, seed)
        train_step(x, y)
        x, y = x.asnumpy().astype(np.float64), y.asnumpy()
        weight -= 0.1 * 2 / BATCH * x.T @ (x @ weight - y)
        np.testing.assert_allclose(network.weight.asnumpy(), weight, rtol=2e-6)
    assert step.get_loss_scale() == 2.0**14


@pytest.mark.parametrize("has_own_scales", slow(False, True))
def test_a_cycle_differentiates_at_one_scale(mode, has_own_scales):
    network = Linear()
    scale = DynamicLossScale(2.0**10, scale_window=1)
    optimizers, scale = (
        ([nn.SGD([network.weight], 0.1)], [scale])
        if has_own_scales
        else (
            nn.SGD([network.weight], 0.1),
            scale,
        )
    )
    step = ManualStep(network, optimizers, scale, gradient_accumulation_steps=2)

    def forward(x, y):
        return step.scale(network(x, y))

    grad = mindspore.grad(forward, None, ParameterTuple([network.weight]))

    @mindspore.jit
    def train_step(x, y):
        x, y = step.begin(x, y)
        return step.end(grad(x, y))

    weight = network.weight.asnumpy().astype(np.float64)
    for cycle in range(3):
        grads = []
        for call in range(2):
            x, y = batch_for(False, 2 * cycle + call)
            train_step(x, y)
            x, y = x.asnumpy().astype(np.float64), y.asnumpy()
            grads.append(2 / BATCH * x.T @ (x @ weight - y))
            if call == 0:
                # Set within a cycle, it holds from the next one on.
                step.set_loss_scale(2.0 ** (5 + cycle))
        weight -= 0.1 * np.mean(grads, 0)
        np.testing.assert_allclose(network.weight.asnumpy(), weight, rtol=2e-6)
