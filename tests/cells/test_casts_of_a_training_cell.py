"""A training cell that is cast as a whole would run its update rule in float16: it says so, where it is cast."""

import mindspore
import pytest
from mindspore import amp, nn
from support.networks import FEATURES, Linear, batch

from ms_lossscale import DynamicLossScale, FiniteGradients, ScaledTrainOneStepCell


class Parent(nn.Cell):
    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

    def construct(self, *inputs):
        return self.cell(*inputs)


def make_cell():
    network = Linear()
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(2.0**10))


@pytest.mark.parametrize(
    "cast",
    [
        lambda cell: cell.to_float(mindspore.float16),
        lambda cell: cell.to_float(mindspore.bfloat16),
        lambda cell: Parent(cell).to_float(mindspore.float16),
        lambda cell: cell.loss_scale.to_float(mindspore.float16),
        lambda cell: amp.auto_mixed_precision(cell, "O2"),
        lambda cell: amp.auto_mixed_precision(cell, "O3"),
        lambda cell: FiniteGradients().to_float(mindspore.float16),
    ],
    ids=["float16", "bfloat16", "a parent", "the update rule", "O2", "O3", "a detector"],
)
def test_is_refused(mode, cast):
    with pytest.raises(
        ValueError, match=r"must stay in float32, but got a cast to b?float16\. Cast the network before"
    ):
        cast(make_cell())


def test_of_the_network_alone_and_to_float32_are_allowed(mode):
    network = nn.Dense(FEATURES, 1)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale(2.0**10))
    cell.set_train().to_float(mindspore.float32)
    network.to_float(mindspore.float16)
    assert network(batch()[0]).dtype == mindspore.float16
    _, overflow, loss_scale = cell(*batch())
    assert (bool(overflow), float(loss_scale)) == (False, 2.0**10)
