"""
The situation that this package is for: tiny gradients, a loss scale, and an optimizer that does not divide by it.

Adam's update is nearly the same for gradients and for 1024 times the gradients, while they are well above `eps`: it
hides a missing division. Gradients of 1e-8 are below the `eps` of 1e-6 of AdamWeightDecay, and there the update is
proportional to the gradient.
"""

import numpy as np
from mindspore import Tensor, nn
from support.sloped_networks import Slopes

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

GRADIENT = np.float32([1e-8, -2e-8, 3e-8, 4e-8])
STEPS = 5


def moved(make_cell):
    """How far the weight moves in some steps."""
    network = Slopes()
    # Far from 1, so that float32 can tell a weight that moved by 1e-8 from one that did not.
    network.weight.set_data(Tensor(np.zeros(4, np.float32)))
    cell = make_cell(network, nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-3)).set_train()
    for _ in range(STEPS):
        cell(Tensor(GRADIENT))
    return network.weight.asnumpy()


def in_numpy(gradient):
    """The same steps of AdamWeightDecay (which corrects no bias), in float64."""
    m = v = w = np.zeros(4)
    for _ in range(STEPS):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        w = w - 1e-3 * m / (np.sqrt(v) + 1e-6)
    return w


def test_adam_weight_decay_moves_as_without_a_scale(mode):
    unscaled = moved(nn.TrainOneStepCell)
    ours = moved(lambda network, optimizer: ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(1024.0)))
    np.testing.assert_array_equal(ours, unscaled)
    # Five float32 steps against float64.
    np.testing.assert_allclose(unscaled, in_numpy(GRADIENT.astype(np.float64)), rtol=1e-5)
