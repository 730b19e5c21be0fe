"""
The forms in which a training cell takes its loss scale. At construction each becomes a loss scale of this package, the
same in both modes; how those work in graph mode is tested with them.
"""

import numpy as np
import pytest
from mindspore import Model, amp, nn
from support.networks import Linear, batch_for

from ms_lossscale import DynamicLossScale, FixedLossScale, ScaledTrainOneStepCell, ScheduledLossScale


def cell_with(loss_scale):
    network = Linear()
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), learning_rate=0.01), loss_scale)


def run(cell, overflows):
    """The overflow that each step reported, and the scale that it used."""
    reported = [cell(*batch_for(overflow))[1:3] for overflow in overflows]
    return [bool(overflow) for overflow, _ in reported], [float(scale) for _, scale in reported]


NUMBERS = [512, 512.0, np.float32(512), np.float64(512), np.int64(512)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_a_number_is_a_fixed_scale_that_drops_overflows(number):
    cell = cell_with(number)
    assert isinstance(cell.loss_scale, FixedLossScale)
    assert run(cell, (0, 1, 0)) == ([False, True, False], [512.0, 512.0, 512.0])


@pytest.mark.parametrize("arguments", [(), (None,)], ids=["left_out", "None"])
def test_none_neither_scales_nor_checks(mode, arguments):
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), learning_rate=0.01), *arguments)
    assert run(cell, (0, 1, 0)) == ([False, False, False], [1.0, 1.0, 1.0])
    assert cell.counters()["applied_steps"] == 3


def test_a_loss_scale_of_this_package_is_used_as_it_is():
    for loss_scale in (FixedLossScale(8), DynamicLossScale(8.0), ScheduledLossScale([1], [8])):
        assert cell_with(loss_scale).loss_scale is loss_scale


def test_a_fixed_manager_that_drops():
    cell = cell_with(amp.FixedLossScaleManager(512, drop_overflow_update=True))
    assert run(cell, (0, 1, 0)) == ([False, True, False], [512.0, 512.0, 512.0])


def test_a_fixed_manager_that_does_not_drop():
    cell = cell_with(amp.FixedLossScaleManager(512, drop_overflow_update=False))
    assert run(cell, (0, 1, 0)) == ([False, False, False], [512.0, 512.0, 512.0])


def test_a_fixed_update_cell():
    cell = cell_with(nn.FixedLossScaleUpdateCell(512))
    assert run(cell, (0, 1, 0)) == ([False, True, False], [512.0, 512.0, 512.0])


@pytest.mark.parametrize(
    "stock",
    [
        lambda: amp.DynamicLossScaleManager(init_loss_scale=512, scale_factor=4, scale_window=2),
        lambda: nn.DynamicLossScaleUpdateCell(loss_scale_value=512, scale_factor=4, scale_window=2),
    ],
    ids=["manager", "update_cell"],
)
def test_a_dynamic_one_of_mindspore_gives_its_scale_factor_and_scale_window(stock):
    cell = cell_with(stock())
    assert isinstance(cell.loss_scale, DynamicLossScale)
    overflows, scales = run(cell, (0, 0, 1, 1, 0, 0, 0))
    assert overflows == [False, False, True, True, False, False, False]
    assert scales == [512.0, 512.0, 2048.0, 512.0, 128.0, 128.0, 512.0]


def test_a_dynamic_one_of_mindspore_may_begin_above_our_ceiling():
    cell = cell_with(amp.DynamicLossScaleManager(init_loss_scale=2**30, scale_factor=2, scale_window=1))
    assert run(cell, (1, 0, 0)) == ([True, False, False], [2.0**30, 2.0**29, 2.0**30])


def test_mindspores_model_takes_none_of_ours():
    """As the page of migrating says: it wants its own class, and on CPU it refuses that one, too."""
    network = nn.Dense(2, 1)
    arguments = network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1)
    with pytest.raises(TypeError, match="'loss_scale_manager'"):
        Model(*arguments, loss_scale_manager=DynamicLossScale())
    with pytest.raises(ValueError, match="are supported on device `CPU`"):
        Model(*arguments, loss_scale_manager=amp.DynamicLossScaleManager())
