"""With several networks a checkpoint keeps every Parameter."""

import mindspore
import pytest
from support.gan_networks import generator_and_discriminator, two_losses, two_optimizers

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, SimultaneousTrainOneStepCell

OF_OPTIMIZERS = """
optimizer_0.learning_rate optimizer_0.global_step optimizer_0.beta1_power optimizer_0.beta2_power
optimizer_0.moment1.generator.weight optimizer_0.moment2.generator.weight optimizer_1.learning_rate
optimizer_1.global_step optimizer_1.moments.discriminator.weight
"""


def every_parameter(cell):
    """
    Every Parameter that a cell or a cell inside it has as an attribute, each once: found without the names, by which
    MindSpore's own methods drop one of two.
    """
    found = {}
    for inside in [cell, *(other for _, other in cell.cells_and_names())]:
        for value in [*vars(inside).values(), list(getattr(inside, "_params", {}).values())]:
            for parameter in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(parameter, mindspore.Parameter):
                    found[id(parameter)] = parameter
    return list(found.values())


@pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])
def test_weights_keep_their_names_optimizers_states_get_a_prefix_and_all_is_saved(make):
    networks = generator_and_discriminator()
    mindspore.save_checkpoint(networks[0], "generator.ckpt")
    own = {parameter.name for network in networks for parameter in network.get_parameters()}
    optimizers = two_optimizers(*networks)
    cell = make(two_losses(*networks), optimizers, DynamicLossScale(), ema_decay=0.5)
    names = [parameter.name for parameter in every_parameter(cell)]
    assert len(set(names)) == len(names) > 30
    assert set(names) >= own | set(OF_OPTIMIZERS.split())
    assert not {name for name in names if name.startswith("moment") or name == "global_step"}
    mindspore.save_checkpoint(cell, "cell.ckpt")
    saved = {name for name in names if not name.endswith("step_counters.overflowed")}  # A diagnosis, not a state.
    assert set(mindspore.load_checkpoint("cell.ckpt")) == saved
    # A checkpoint of a network alone still loads, and a second cell renames nothing twice.
    assert mindspore.load_param_into_net(networks[0], mindspore.load_checkpoint("generator.ckpt"))[0] == []
    second = make(two_losses(*networks), optimizers, DynamicLossScale(), ema_decay=0.5)
    assert list(second.parameters_dict()) == list(cell.parameters_dict())
