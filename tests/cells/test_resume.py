"""All that an optimizer remembers is saved. That a run goes on bit for bit, the configurations show, and in a
new process the examples."""

import pytest
from mindspore import Parameter
from support.networks import LinearWithBias
from support.optimizers import RUN_EVERYWHERE, make_optimizer

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


def parameters_in(value):
    """The Parameters that an attribute holds, also in lists and dicts, where MindSpore does not look for them."""
    if isinstance(value, Parameter):
        return [value]
    value = list(value.values()) if isinstance(value, dict) else value
    return [its for each in value for its in parameters_in(each)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", sorted(RUN_EVERYWHERE))
def test_all_that_an_optimizer_remembers_is_in_the_checkpoint(name):
    network = LinearWithBias()
    optimizer, _ = make_optimizer(name, network)
    remembered = {parameter.name for value in vars(optimizer).values() for parameter in parameters_in(value)}
    assert remembered >= {"weight", "bias"}
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale())
    assert remembered <= set(cell.parameters_dict())
