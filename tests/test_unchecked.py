"""Without a check every step updates, with a learning-rate schedule too, as in the unscaled stock cell."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_lossscale import FixedLossScale, ScaledTrainOneStepCell


@pytest.mark.parametrize("make_scale", [lambda: None, lambda: FixedLossScale(8.0, drop_overflow_update=False)])
def test_equals_the_stock_cell_under_a_schedule(mode, make_scale):
    x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
    weights = []
    for make_cell in (nn.TrainOneStepCell, lambda *pair: ScaledTrainOneStepCell(*pair, make_scale())):
        network = nn.Dense(4, 1, weight_init="ones", bias_init="zeros")
        schedule = nn.ExponentialDecayLR(0.1, 0.9, 2)
        optimizer = nn.Momentum(network.trainable_params(), schedule, 0.9)
        cell = make_cell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
        for _ in range(4):
            cell(x, y)
        weights.append(network.weight.asnumpy())
    # Scales that are powers of two round nothing.
    assert np.array_equal(*weights)
