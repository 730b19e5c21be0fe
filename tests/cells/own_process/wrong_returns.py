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


class Returns(Linear):
    """Returns what a function makes of the input and the loss."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, x, y):
        return self.function(x, super().construct(x, y))


def image_and_loss(x, loss):
    return x, loss


def image_and_losses(x, loss):
    return x, None, loss.reshape(1, 1), loss


def two_losses(x, loss):
    return loss, 2 * loss


def dict_of_loss(x, loss):
    return {"loss": loss, "image": x}


class TestOneNetwork:
    @pytest.mark.parametrize("has_aux", [False, True])
    @pytest.mark.parametrize("returned", [image_and_loss, image_and_losses])
    def test_an_image_before_its_loss(self, mode, has_aux, returned):
        network = Returns(returned)
        cell = ScaledTrainOneStepCell(network, *sgd([network]), 1024, has_aux=has_aux)
        shown = {
            image_and_loss: r"\(Tensor of shape \(4, 3\), Tensor of shape \(\)\)",
            image_and_losses: r"\(Tensor of shape \(4, 3\), None, Tensor of shape \(1, 1\), Tensor of shape \(\)\)",
        }
        message = f"network 0 must return its loss first.*but it returned {shown[returned]}.*Wrap it in a Cell"
        with pytest.raises(ValueError, match=message):
            cell(*batch())

    @pytest.mark.parametrize(
        "network, has_aux, message",
        [
            (lambda: WithAux(Linear()), False, "has_aux=True"),
            (Linear, True, r"\(loss, \*aux\)"),
            (ReturnsNumber, False, r"network 0 must return one Tensor, the loss, but it returned 1\.0\."),
            (lambda: Returns(dict_of_loss), False, r"returned {'loss': Tensor of shape \(\), 'image': Tensor of"),
            (lambda: Returns(two_losses), False, r"\(Tensor of shape \(\), Tensor of shape \(\)\)\. .*wrap .* sum"),
        ],
        ids=["a tuple", "one loss", "no tensor", "a dict", "two losses"],
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
        with pytest.raises(TypeError, match=r"network 1 must return one Tensor, the loss.*needs has_aux=True"):
            cell(*batch())

    @BOTH
    def test_an_image_before_its_loss(self, mode, make):
        networks = [renamed(f"{i}.", network) for i, network in enumerate((Linear(), Returns(image_and_loss)))]
        cell = make(networks, sgd(networks), has_aux=[False, True])
        with pytest.raises(ValueError, match=r"network 1 must return its loss first.*Tensor of shape \(4, 3\)"):
            cell(*batch())

    @pytest.mark.parametrize("losses", [1, 3])
    def test_a_tuple_of_too_few_or_too_many_losses(self, mode, losses):
        networks = pair()
        # The last one once more, to be too many.
        network = TupleOf(*[*networks, networks[1]][:losses])
        if losses == 1:
            network.in_no_loss = networks[1]
        cell = SimultaneousTrainOneStepCell(network, sgd(networks))
        with pytest.raises(TypeError, match=f"must return a tuple of 2 losses.*returned .{'.*shape' * losses}"):
            cell(*batch())
