"""Losses that are sums over different numbers of things. The configurations draw those whose weight is a Tensor."""

import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, nn
from support.refused import refused
from support.training import by_sgd, stepping

from ms_lossscale import DynamicLossScale


class OfNumPy(nn.Cell):
    """Its gradient is its input; its weight is given."""

    def __init__(self, count):
        super().__init__()
        self.weight, self.count = Parameter(Tensor([0.0, 0.0]), name="weight"), count

    def construct(self, x):
        return (self.weight * x).sum(), self.count


COUNTS = [4, np.int64(4), *slow(np.float32(4), np.float64(4), np.int32(4))]


@pytest.mark.parametrize("kind", ["scaled", "in_jit", *slow("eagerly")])
@pytest.mark.parametrize("count", COUNTS)
def test_a_weight_may_be_a_number(mode, count, kind):
    network, keywords = OfNumPy(count), {"gradient_accumulation_steps": 2}
    if kind == "scaled":
        call = by_sgd(network, DynamicLossScale(2.0**4), 1.0, weighted=True, **keywords)
    else:
        step = by_sgd(network, DynamicLossScale(2.0**4), 1.0, "manual", **keywords)

        def forward(x):
            return network(x)[0]

        call = stepping(step, forward, kind, weight=count)
    for _ in range(2):
        call(Tensor([4.0, 8.0]))
    np.testing.assert_array_equal(network.weight.asnumpy(), [-1, -2])


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_is_no_weight(mode):
    for count, error, words in (
        (np.bool_(True), TypeError, "a number or a Tensor of shape (), but got True of type 'bool_'"),
        ("4", TypeError, "but got '4' of type 'str'"),
        (Tensor([4.0, 4.0]), TypeError, "but got a Tensor of shape (2,)"),
        (np.float32(np.nan), ValueError, "a finite number >= 0, but got nan"),
    ):
        cell = by_sgd(OfNumPy(count), 16.0, weighted=True)
        refused(lambda: cell(Tensor([4.0, 8.0])), error, "ScaledTrainOneStepCell", words)  # noqa: B023
    cell = by_sgd(OfNumPy(Tensor(-1.0)), 16.0, weighted=True)
    assert bool(cell(Tensor([4.0, 8.0]))[1]) and cell.skip_reasons()["loss"] == 1
