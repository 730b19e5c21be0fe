"""A training cell within another Cell, which calls it with too few inputs: an error that says what to do."""

import pytest
from mindspore import GRAPH_MODE, Model, nn
from mindspore.dataset import NumpySlicesDataset
from support.in_mode import in_mode
from support.networks import Linear, batch

from ms_lossscale import ScaledTrainOneStepCell, SimultaneousTrainOneStepCell


class Losses(Linear):
    def construct(self, x, y):
        return (super().construct(x, y),)


@pytest.mark.parametrize("one_cell", [False, True])
def test_model_with_a_loss_function(one_cell):
    network = Losses() if one_cell else Linear()
    optimizer = nn.SGD(network.trainable_params())
    if one_cell:
        cell = SimultaneousTrainOneStepCell(network, [optimizer], 8.0)
    else:
        cell = ScaledTrainOneStepCell(network, optimizer, 8.0)
    dataset = NumpySlicesDataset(tuple(each.asnumpy() for each in batch())).batch(2)
    words = r"takes 2 inputs \(x, y\), but within another Cell it gets 1.*pass Model\(cell\) without loss_fn"
    with in_mode(GRAPH_MODE), pytest.raises(TypeError, match=words):
        Model(cell, nn.MSELoss()).train(1, dataset, dataset_sink_mode=False)
