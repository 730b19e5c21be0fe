"""A compiled step of a ManualStep differentiates at the scale of this step, not at that of the one before."""

import mindspore
import numpy as np
from mindspore import nn
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
