"""What a network returns, and how many inputs a call brings, is seen in the first call, which says what is wrong."""

import pytest
from mindspore import nn
from support.gan_networks import TupleOf, WithAux, renamed
from support.networks import Linear, batch

from ms_lossscale import AlternatingTrainOneStepCell, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

BOTH = pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])


def pair():
    return [renamed(f"{i}.", Linear(seed=i)) for i in range(2)]


def sgd(networks):
    return [nn.SGD(network.trainable_params(), learning_rate=0.1) for network in networks]


class ReturnsNumber(Linear):
    def construct(self, x, y):
        return 1.0


class TestOneNetwork:
    @pytest.mark.parametrize(
        "network, has_aux, message",
        [
            (lambda: WithAux(Linear()), False, "has_aux=True"),
            (Linear, True, r"\(loss, \*aux\)"),
            (ReturnsNumber, False, "one Tensor"),
        ],
        ids=["a tuple", "one loss", "no tensor"],
    )
    def test_what_it_returns(self, mode, network, has_aux, message):
        network = network()
        cell = ScaledTrainOneStepCell(network, *sgd([network]), 1024, has_aux=has_aux)
        with pytest.raises(TypeError, match=f"ScaledTrainOneStepCell.*{message}"):
            cell(*batch())


class TestSeveralNetworks:
    @BOTH
    def test_more_than_the_loss_without_has_aux(self, mode, make):
        networks = pair()
        cell = make([networks[0], WithAux(networks[1])], sgd(networks))
        with pytest.raises(TypeError, match=r"must return one Tensor, the loss.*needs has_aux=True"):
            cell(*batch())

    @BOTH
    def test_only_the_loss_with_has_aux(self, mode, make):
        networks = pair()
        cell = make([networks[0], WithAux(networks[1])], sgd(networks), has_aux=True)
        with pytest.raises(TypeError, match=r"must return a tuple \(loss, \*aux\)"):
            cell(*batch())

    @BOTH
    def test_positions_that_do_not_exist(self, mode, make):
        networks = pair()
        cell = make(networks, sgd(networks), network_inputs=[(0, 1), (0, 2)])
        with pytest.raises(ValueError, match="gives network 1 the input at position 2, but the cell was called with 2"):
            cell(*batch())

    @pytest.mark.parametrize("losses", [1, 3])
    def test_a_tuple_of_too_few_or_too_many_losses(self, mode, losses):
        networks = pair()
        # The last one once more, to be too many.
        network = TupleOf(*[*networks, networks[1]][:losses])
        if losses == 1:
            network.in_no_loss = networks[1]
        cell = SimultaneousTrainOneStepCell(network, sgd(networks))
        with pytest.raises(TypeError, match="one network for 2 optimizers must return a tuple of 2 losses"):
            cell(*batch())

    def test_a_tuple_of_losses_in_a_list(self, mode):
        networks = pair()
        cell = AlternatingTrainOneStepCell([TupleOf(*networks), networks[1]], sgd(networks))
        with pytest.raises(TypeError, match="must return one Tensor, the loss"):
            cell(*batch())
