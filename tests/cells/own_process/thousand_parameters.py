"""MindSpore's compiler has crashed at so many in a process that had compiled for long before (segmentation fault)."""

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

pytestmark = pytest.mark.slow


class SumOfMany(nn.Cell):  # Many weights, each of which has the input as its gradient.
    def __init__(self, count):
        super().__init__()
        zeros = [Parameter(Tensor(np.zeros(2, np.float32)), name=f"term_{i}") for i in range(count)]
        self.terms = ParameterTuple(zeros)

    def construct(self, x):
        return (ops.addn(self.terms) * x).sum()


def test_a_network_with_a_thousand_parameters(mode):
    network = SumOfMany(1000)
    assert len(network.trainable_params()) == 1000
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.5), DynamicLossScale(2.0**10))
    assert not bool(cell(Tensor(np.float32([1.0, 2.0])))[1])
    for parameter in network.trainable_params():
        np.testing.assert_array_equal(parameter.asnumpy(), np.float32([-0.5, -1.0]))
    assert bool(cell(Tensor(np.float32([1.0, np.inf])))[1])
    for parameter in network.trainable_params():
        np.testing.assert_array_equal(parameter.asnumpy(), np.float32([-0.5, -1.0]))
