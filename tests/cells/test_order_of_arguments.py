"""Arguments in a wrong order are named as what they are, with the order that is right."""

import pytest
from mindspore import amp, nn
from mindspore.experimental import optim
from support.gan_networks import renamed
from support.networks import Linear

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    build_train_network,
)

NETWORK = Linear()
ADAM, MANAGER = nn.Adam(NETWORK.trainable_params()), amp.DynamicLossScaleManager()
SCALED = r"The order is ScaledTrainOneStepCell\(network, optimizer, loss_scale\)\."
BUILD = r"The order is build_train_network\(network, optimizer, loss_fn\)\."


@pytest.mark.parametrize(
    "make, arguments, words",
    [
        (
            ScaledTrainOneStepCell,
            (ADAM, NETWORK),
            f"'network' can't be an optimizer, but 'network' is of class Adam, 'optimizer' is of class Lin.*{SCALED}",
        ),
        (
            ScaledTrainOneStepCell,
            (optim.SGD(NETWORK.trainable_params(), 0.1), NETWORK, 8.0),
            f"'network' can't be an optimizer, but .* 'loss_scale' is 8.0. {SCALED}",
        ),
        (
            ScaledTrainOneStepCell,
            (NETWORK, 1024, ADAM),
            f"'optimizer' can't be a loss scale, but .* is 1024, .*{SCALED}",
        ),
        (ScaledTrainOneStepCell, (NETWORK, MANAGER, ADAM), "'optimizer' can't be a loss scale"),
        (ScaledTrainOneStepCell, (DynamicLossScale(), NETWORK, ADAM), "'network' can't be a loss scale"),
        (ScaledTrainOneStepCell, (NETWORK, None, ADAM), "'loss_scale' can't be an optimizer"),
        (
            ScaledTrainOneStepCell,
            (NETWORK, nn.MSELoss(), ADAM),
            f"'optimizer' can't be a loss function.*{SCALED} The net",
        ),
        (ScaledTrainOneStepCell, (NETWORK, ADAM, nn.MSELoss()), r"'loss_scale' can't be a loss .* nn\.WithLossCell\("),
        (build_train_network, (NETWORK, nn.MSELoss(), ADAM), f"'optimizer' can't be a loss function, .*{BUILD}"),
        (build_train_network, (ADAM, NETWORK, nn.MSELoss()), f"'network' can't be an optimizer, .*{BUILD}"),
    ],
)
def test_of_one_network(make, arguments, words):
    with pytest.raises(TypeError, match=f"For '{make.__name__}', the argument {words}"):
        make(*arguments)


@pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])
def test_of_several_networks(make):
    networks = [renamed(f"{i}.", Linear()) for i in range(2)]
    optimizers = [nn.SGD(network.trainable_params()) for network in networks]
    order = rf"The order is {make.__name__}\(networks, optimizers, loss_scale\)"
    for arguments, words in (
        ((optimizers, networks), rf"'networks' can't be an optimizer, but 'networks' is \[of class SGD, .*{order}"),
        ((networks, DynamicLossScale(), optimizers), f"'optimizers' can't be a loss scale, .*{order}"),
        ((networks, [8.0, 8.0], optimizers), f"'optimizers' can't be a loss scale, .*{order}"),
        ((networks, None, optimizers), f"'loss_scale' can't be an optimizer, .*{order}"),
    ):
        with pytest.raises(TypeError, match=words):
            make(*arguments)


class LossOfItsOwn(nn.LossBase):
    """A loss function with a weight is a network, too."""

    def __init__(self):
        super().__init__()
        self.linear = Linear()

    def construct(self, x, y):
        return self.linear(x, y)


def test_what_may_be_right_is_taken():
    network = LossOfItsOwn()
    ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), MANAGER)
