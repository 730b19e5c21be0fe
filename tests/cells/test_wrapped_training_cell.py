"""A training cell in another one would make each step twice."""

import pytest
from mindspore import Model, nn
from support.networks import Linear

from ms_lossscale import ScaledTrainOneStepCell


@pytest.mark.parametrize(
    "wrap",
    [lambda cell: Model(cell, optimizer=cell.optimizer), lambda cell: nn.TrainOneStepCell(cell, cell.optimizer)],
    ids=["Model", "TrainOneStepCell"],
)
def test_it_is_refused(wrap):
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), 128.0)
    with pytest.raises(ValueError, match=r"which trains by itself.*without an optimizer"):
        wrap(cell)
