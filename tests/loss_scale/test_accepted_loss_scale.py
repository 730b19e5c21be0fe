"""
The forms in which a training cell takes its loss scale. At construction each becomes a loss scale of this package, the
same in both modes; how those work in graph mode is tested with them.
"""

import numpy as np
import pytest
from mindspore import Model, amp, nn
from support.networks import Linear, batch_for

from ms_lossscale import DynamicLossScale, FixedLossScale, ScaledTrainOneStepCell, ScheduledLossScale

FIXED = "512 512x 512"
# What is given, which steps overflow if one with an x does, and the scale of each.
CASES = {
    **{type(number).__name__: (number, FIXED) for number in (512, 512.0, np.float32(512), np.float64(512))},
    "int64": (np.int64(512), FIXED),
    "None": (None, "1 1! 1"),
    "fixed manager": (amp.FixedLossScaleManager(512, drop_overflow_update=True), FIXED),
    "fixed manager that does not drop": (amp.FixedLossScaleManager(512, drop_overflow_update=False), "512 512! 512"),
    "fixed update cell": (lambda: nn.FixedLossScaleUpdateCell(512), FIXED),
    "dynamic manager": (amp.DynamicLossScaleManager(512, 4, 2), "512 512 2048x 512x 128 128 512"),
    "dynamic update cell": (lambda: nn.DynamicLossScaleUpdateCell(512, 4, 2), "512 512 2048x 512x 128 128 512"),
    "above our ceiling": (amp.DynamicLossScaleManager(2**30, 2, 1), "1073741824x 536870912 1073741824"),
}


def cell_with(*loss_scale):
    network = Linear()
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), learning_rate=0.01), *loss_scale)


@pytest.mark.parametrize("name", CASES)
def test_each_form(name):
    given, steps = CASES[name]
    cell, seen = cell_with(given() if callable(given) else given), []
    for step in steps.split():
        _, overflow, scale = cell(*batch_for(step[-1] in "x!"))
        # An overflow that nothing looks for.
        mark = "x" if overflow else "!" if step[-1] == "!" else ""
        seen.append(f"{float(scale):.0f}{mark}")
    assert " ".join(seen) == steps


def test_by_default_there_is_none_and_one_of_this_package_is_used_as_it_is():
    assert cell_with().get_loss_scale() == 1.0
    for loss_scale in (FixedLossScale(8), DynamicLossScale(8.0), ScheduledLossScale([1], [8])):
        assert cell_with(loss_scale).loss_scale is loss_scale


@pytest.mark.only_on("CPU", reason="only CPU refuses MindSpore's own manager")
def test_mindspores_model_takes_none_of_ours():
    """As the page of migrating says: it wants its own class, and on CPU it refuses that one, too."""
    network = nn.Dense(2, 1)
    arguments = network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1)
    with pytest.raises(TypeError, match="'loss_scale_manager'"):
        Model(*arguments, loss_scale_manager=DynamicLossScale())
    with pytest.raises(ValueError, match="are supported on device `CPU`"):
        Model(*arguments, loss_scale_manager=amp.DynamicLossScaleManager())
