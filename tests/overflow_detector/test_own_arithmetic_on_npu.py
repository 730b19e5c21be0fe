"""What a step computes of its own sets no NPU's register before it has read it: large finite values are no overflow."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, NormSpike, ScaledTrainOneStepCell, emulation


class LargeStatistics(nn.Cell):
    """A linear layer, which writes finite values whose sum is not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 1)
        self.statistics = Parameter(Tensor(np.ones(8, np.float32)), name="statistics", requires_grad=False)
        self.large = Tensor(np.full(8, 2e38, np.float32))

    def construct(self, x):
        return ops.depend(self.layer(x).square().mean(), ops.assign(self.statistics, self.large))


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"clip_norm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"max_retries": 1},
        {"skip_conditions": [NormSpike(max_norm=1e9)]},
    ],
)
def test_large_statistics_are_no_overflow(mode, keywords):
    network = LargeStatistics()
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    with emulation.saturation_mode() as register:
        cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(1024.0), **keywords).set_train()
        skips = [bool(cell(Tensor(np.ones((2, 4), np.float32)))[1]) for _ in range(4)]
    assert skips == [False] * 4
    assert cell.get_loss_scale() == 1024.0
    assert register.events.count("get 0") >= 4


def test_a_sum_of_a_step_that_overflows_sets_the_register(mode):
    large = Tensor(np.full(8, 2e38, np.float32))
    with emulation.saturation_mode() as register:
        network = nn.Dense(8, 1)
        optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        loss_cell = nn.WithLossCell(network, nn.L1Loss(reduction="sum"))
        # Its gradients are as large as its inputs, and their norm is measured after the register was read.
        cell = ScaledTrainOneStepCell(loss_cell, optimizer, 1.0, clip_norm=1.0).set_train()
        _, overflow, _ = cell(large.reshape((1, 8)) / 1e15, Tensor(np.zeros((1, 1)), mstype.float32))
        assert not overflow
        assert register.raised
