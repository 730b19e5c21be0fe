"""With several networks a checkpoint keeps every Parameter."""

import mindspore
import pytest
from support.gan_networks import generator_and_discriminator, two_losses, two_optimizers

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, SimultaneousTrainOneStepCell


@pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])
def test_a_checkpoint_of_a_network_alone_loads_and_a_second_cell_renames_nothing_twice(make):
    """Names and their prefixes are those of the checkpoints of releases."""
    networks = generator_and_discriminator()
    mindspore.save_checkpoint(networks[0], "generator.ckpt")
    own = {parameter.name for network in networks for parameter in network.get_parameters()}
    optimizers = two_optimizers(*networks)
    first, second = (make(two_losses(*networks), optimizers, DynamicLossScale(), ema_decay=0.5) for _ in range(2))
    names = list(first.parameters_dict())
    assert set(names) >= own | {"optimizer_0.moment1.generator.weight", "optimizer_1.moments.discriminator.weight"}
    assert mindspore.load_param_into_net(networks[0], mindspore.load_checkpoint("generator.ckpt"))[0] == []
    assert list(second.parameters_dict()) == names
