"""A call with a number of inputs that a network can't take ends before anything is compiled, with what to do."""

import pytest
from mindspore import nn
from support.gan_networks import renamed
from support.networks import Linear, batch

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)

X, Y = batch()


def scaled(network):
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.01), DynamicLossScale())


class Optional(nn.Cell):
    """Takes one to three inputs by position."""

    def __init__(self, least=1):
        super().__init__()
        self.linear = Linear()

    def construct(self, x, y=None, z=None, *, w=None):
        return self.linear(x, x if y is None else y)


class Anything(Optional):
    def construct(self, *inputs):
        return self.linear(inputs[0], inputs[1])


class OfTwo(nn.Cell):
    """A network whose output depends on two inputs."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1)

    def construct(self, x, mask):
        return self.dense(x * mask)


MODEL = r"pass Model\(cell\) without loss_fn"
WITH_LOSS = r"pass the cell nn\.WithLossCell\(network, loss_fn\)"


@pytest.mark.parametrize(
    "network, inputs, words",
    [
        (
            lambda: nn.Dense(3, 1),
            (X, Y),
            rf"'Dense' takes 1 input \(x\), but the cell was called with 2\. .*{WITH_LOSS}",
        ),
        (Linear, (X,), rf"'Linear' takes 2 inputs \(x, y\), but .* with 1, so that y would be missing.*{MODEL}"),
        (Linear, (), "so that x, y would be missing"),
        (Linear, ((X, Y),), r"called with 1, a tuple\. Unpack it: cell\(\*inputs\)"),
        (Optional, (X, Y, X, Y), r"takes 1 to 3 inputs \(x, y, z\), but the cell was called with 4"),
        (Optional, (), r"takes 1 to 3 inputs \(x, y, z\), but the cell was called with 0, so that x would be"),
        (lambda: nn.WithLossCell(OfTwo(), nn.MSELoss()), (X, X, Y), r"'WithLossCell' takes 2 inputs \(data, label\)"),
        (lambda: nn.WithLossCell(OfTwo(), nn.MSELoss()), (X, Y), r"'OfTwo' takes 2 .* passes it the data only"),
    ],
)
def test_one_network(mode, network, inputs, words):
    cell = scaled(network())
    for call in (cell, cell.find_loss_scale):
        with pytest.raises(TypeError, match=f"For 'ScaledTrainOneStepCell', {words}" if words[0] == "'" else words):
            call(*inputs)
    assert cell.counters()["applied_steps"] == 0


@pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])
@pytest.mark.parametrize(
    "network_inputs, inputs, words",
    [
        (
            None,
            (X, Y, X),
            r"called with 3, and each network gets all inputs .* network_inputs=\[\(0, 1\), \(1,\)\], say",
        ),
        ([(0, 1), ()], (X, Y), r"network_inputs gives it 0, those at the positions \(\)"),
        ([(0, 1), (1,)], (X, Y), r"network_inputs gives it 1, those at the positions \(1,\)"),
    ],
)
def test_several_networks(make, network_inputs, inputs, words):
    networks = [renamed(f"{i}.", Linear()) for i in range(2)]
    optimizers = [nn.SGD(network.trainable_params()) for network in networks]
    with pytest.raises(TypeError, match=f"For '{make.__name__}', network .* takes 2 inputs .*{words}"):
        make(networks, optimizers, 8.0, network_inputs=network_inputs)(*inputs)


def test_keywords():
    with pytest.raises(TypeError, match=r"passed by position, .* but got 'x', 'y' by keyword"):
        scaled(Linear())(x=X, y=Y)


@pytest.mark.parametrize("network, inputs", [(Optional, (X,)), (Optional, (X, Y, None)), (Anything, (X, Y, X, Y))])
def test_what_fits_runs(mode, network, inputs):
    assert not scaled(network())(*inputs)[1]
