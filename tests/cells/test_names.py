"""With several networks a checkpoint keeps every Parameter."""

import mindspore
import pytest
from support.gan_networks import generator_and_discriminator, two_losses, two_optimizers

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    SimultaneousTrainOneStepCell,
)

BOTH_CELLS = pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])


def every_parameter(cell):
    """
    Every Parameter that a cell or a cell inside it has as an attribute, each once: found without the names, by which
    MindSpore's own methods drop one of two.
    """
    found = {}
    for inside in [cell, *(other for _, other in cell.cells_and_names())]:
        for value in vars(inside).values():
            for parameter in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(parameter, mindspore.Parameter):
                    found[id(parameter)] = parameter
        for parameter in getattr(inside, "_params", {}).values():
            found[id(parameter)] = parameter
    return list(found.values())


@BOTH_CELLS
class TestNames:
    def test_weights_keep_theirs_and_optimizer_states_get_a_prefix(self, make):
        networks = generator_and_discriminator()
        own = {parameter.name for network in networks for parameter in network.get_parameters()}
        cell = make(two_losses(*networks), two_optimizers(*networks), DynamicLossScale())
        assert {parameter.name for network in networks for parameter in network.get_parameters()} == own
        names = set(cell.parameters_dict())
        assert names >= own
        assert names >= {
            "optimizer_0.learning_rate",
            "optimizer_0.global_step",
            "optimizer_0.beta1_power",
            "optimizer_0.beta2_power",
            "optimizer_0.moment1.generator.weight",
            "optimizer_0.moment2.generator.weight",
            "optimizer_1.learning_rate",
            "optimizer_1.global_step",
            "optimizer_1.moments.discriminator.weight",
        }
        assert not {name for name in names if name.startswith("moment") or name == "global_step"}

    def test_a_checkpoint_keeps_every_parameter(self, make):
        networks = generator_and_discriminator()
        cell = make(two_losses(*networks), two_optimizers(*networks), DynamicLossScale(), ema_decay=0.5)
        parameters = every_parameter(cell)
        names = [parameter.name for parameter in parameters]
        assert len(names) > 30
        assert len(set(names)) == len(names)
        mindspore.save_checkpoint(cell, "cell.ckpt")
        assert set(mindspore.load_checkpoint("cell.ckpt")) == set(names)

    def test_a_checkpoint_of_the_networks_alone_still_loads(self, make):
        networks = generator_and_discriminator()
        mindspore.save_checkpoint(networks[0], "generator.ckpt")
        others = generator_and_discriminator()
        make(two_losses(*others), two_optimizers(*others))
        not_loaded, _ = mindspore.load_param_into_net(others[0], mindspore.load_checkpoint("generator.ckpt"))
        assert not not_loaded

    def test_a_second_cell_of_the_same_optimizers_renames_nothing_twice(self, make):
        networks = generator_and_discriminator()
        optimizers = two_optimizers(*networks)
        first = make(two_losses(*networks), optimizers)
        names = list(first.parameters_dict())
        assert list(make(two_losses(*networks), optimizers).parameters_dict()) == names
