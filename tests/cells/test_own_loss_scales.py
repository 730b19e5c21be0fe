"""A loss scale for each network of a SimultaneousTrainOneStepCell, beyond what the configurations draw."""

import pytest
from conftest import quick_in_pynative_mode
from support.retried_networks import LEARNING_RATE, Penalised, Slope, inputs
from support.training import by_sgd

from ms_lossscale import DynamicLossScale, FixedLossScale


def cell_of(networks, loss_scales, **keywords):
    return by_sgd(networks, loss_scales, LEARNING_RATE, "simultaneous", network_inputs=[(0, 1), (0, 2)], **keywords)


@quick_in_pynative_mode
def test_names_reading_and_setting(mode):
    networks, loss_scales = [Slope("first"), Slope("second")], (DynamicLossScale(2.0**10), FixedLossScale(8.0))
    cell = cell_of(networks, loss_scales)
    names = [name for name in cell.parameters_dict() if "scale" in name]
    assert {f"network_{i}.loss_scale.scale_value" for i in range(2)} <= set(names)
    assert all(name.startswith(("network_0.loss_scale.", "network_1.loss_scale.")) for name in names)
    assert all(one is other for one, other in zip(cell.loss_scale, loss_scales))
    assert cell.get_loss_scale() == [1024.0, 8.0]
    cell.set_loss_scale([16.0, 4.0])
    assert cell.scale_sense.asnumpy().tolist() == [16.0, 4.0]
    assert cell(*inputs(1.0, 1.0))[2].asnumpy().tolist() == [16.0, 4.0]
    cell.set_loss_scale(2.0)
    assert cell.get_loss_scale() == [2.0, 2.0]


@pytest.mark.slow
@quick_in_pynative_mode
def test_an_input_gradient_of_one_of_the_scales(mode):
    loss_scales = [DynamicLossScale(2.0**15), DynamicLossScale(2.0**15)]
    networks = [Penalised(loss_scales[0], "first"), Slope("second")]
    cell = cell_of(networks, loss_scales, max_retries=5)
    _, overflow, scales, _ = cell(*inputs(1.0, 1.0))
    assert not overflow.asnumpy()
    assert scales.asnumpy().tolist() == [2.0**11, 2.0**15]
    retries = cell.counters()["retries"]
    # The loss of the network that holds none can't be mended.
    assert cell(*inputs(1.0, float("nan")))[1].asnumpy()
    assert cell.counters()["retries"] == retries == 4
