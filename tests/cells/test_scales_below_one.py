"""A gradient that is finite times a scale below 1, and not by itself, is an overflow, however the scale got there."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, nn

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

LOW = 2.0**-120
# The gradient of the weight is SMALL, or SMALL * 1e30, which is no float32.
SMALL = 1e10


class Product(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros(3, np.float32)), name="weight")

    def construct(self, factor):
        return (self.weight * SMALL).sum() * factor


def set_by_hand(cell):
    cell.set_loss_scale(LOW)


def loaded(cell):
    cell.load_state_dict({**cell.parameters_dict(), "loss_scale.scale_value": Tensor(LOW, mindspore.float32)})


def loaded_by_mindspore(cell):
    mindspore.load_param_into_net(cell, {"loss_scale.scale_value": Parameter(Tensor(LOW, mindspore.float32))})


PAIRS = list(zip((set_by_hand, loaded, loaded_by_mindspore), ({}, {"clip_norm": float("inf")}, {"max_retries": 1})))
OTHERS = [(lower, keywords) for lower, _ in PAIRS for _, keywords in PAIRS if (lower, keywords) not in PAIRS]


@pytest.mark.parametrize("lower, keywords", [*PAIRS, *slow(*OTHERS)])
def test_a_scale_that_falls_below_one_while_a_cell_runs(mode, lower, keywords):
    network = Product()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=2.0**-30)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(1024.0), **keywords).set_train()
    fits, too_large = Tensor(1.0, mindspore.float32), Tensor(1e30, mindspore.float32)
    # At 1024, both gradients are as finite as they are by themselves.
    assert [bool(cell(factor)[1]) for factor in (fits, too_large, fits)] == [False, True, False]
    lower(cell)
    scales = [float(output[2]) for output in map(cell, (fits, fits))]
    assert scales == [LOW, LOW]
    assert bool(cell(too_large)[1])
    assert network.weight.asnumpy().tolist() == [np.float32(-4 * SMALL * 2.0**-30)] * 3
    # The law goes on from its floor.
    assert cell.get_loss_scale() == 1.0
    assert not bool(cell(fits)[1])
