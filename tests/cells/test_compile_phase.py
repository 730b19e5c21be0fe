"""A call of a compiled training cell writes nothing into the cells below it, unless a graph is compiled for it."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.training import same_bits

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

if not hasattr(nn.Cell, "compile_phase"):
    pytest.skip("MindSpore before 2.8 writes nothing into the cells below a called one", allow_module_level=True)


class Noted(nn.Dense):
    """Notes what MindSpore writes into it."""

    def __init__(self):
        super().__init__(4, 1)
        self.written = []

    @property
    def compile_phase(self):
        return nn.Cell.compile_phase.fget(self)

    @compile_phase.setter
    def compile_phase(self, value):
        self.written.append(value)
        nn.Cell.compile_phase.fset(self, value)


def make():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(0)
    net = Noted()
    network = nn.WithLossCell(net, nn.MSELoss())
    return net, ScaledTrainOneStepCell(network, nn.Momentum(net.trainable_params(), 0.1, 0.9), DynamicLossScale())


def batch(size):
    return Tensor(np.ones((size, 4), np.float32)), Tensor(np.zeros((size, 1), np.float32))


def test_stock_cells_write_in_each_call():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Noted()
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params()))
    cell(*batch(2))
    before = len(net.written)
    cell(*batch(2))
    assert len(net.written) > before


def test_written_once_for_each_graph():
    net, cell = make()
    counts = []
    for size in (2, 2, 2, 3, 3, 2):
        cell(*batch(size))
        counts.append(len(net.written))
    assert counts[0] > 0
    assert counts[0] == counts[1] == counts[2] < counts[3] == counts[4]
    assert len(set(net.written)) == 2


def test_a_network_that_is_evaluated_between_steps_trains_as_one_that_is_not():
    (net, cell), (alone, other) = make(), make()
    for _ in range(3):
        cell(*batch(2))
        net.set_train(False)
        net(batch(2)[0])
        net.set_train(True)
        other(*batch(2))
    assert same_bits(net.weight.asnumpy(), alone.weight.asnumpy())
