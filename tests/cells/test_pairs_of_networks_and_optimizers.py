"""Network i is trained by optimizer i: in another order no gradient could flow, and nothing would train."""

import pytest
from mindspore import nn
from support.gan_networks import NETWORK_INPUTS, generator_and_discriminator, two_losses, two_optimizers
from support.networks import Linear

from ms_lossscale import AlternatingTrainOneStepCell, SimultaneousTrainOneStepCell

CELLS = [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell]


def separate():
    networks = [Linear(), Linear()]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    return networks, [nn.SGD(network.trainable_params(), 0.1) for network in networks]


@pytest.mark.parametrize("cell", CELLS)
def test_swapped_optimizers_are_refused(cell):
    networks, optimizers = separate()
    message = r"none of the parameters of optimizers\[0\] \(SGD: 1\.weight, \.\.\.\) belongs to networks\[0\]"
    with pytest.raises(ValueError, match=message):
        cell(networks, optimizers[::-1])
    cell(networks, optimizers)


@pytest.mark.parametrize("cell", CELLS)
def test_losses_that_hold_both_networks_are_not(cell):
    networks = generator_and_discriminator()
    cell(two_losses(*networks), two_optimizers(*networks), network_inputs=NETWORK_INPUTS)
