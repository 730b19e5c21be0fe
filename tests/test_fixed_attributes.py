"""What a compiled step would not hear of can't be set."""

import copy

import pytest
from mindspore import nn
from support.networks import Linear, batch

from ms_lossscale import DynamicLossScale, FixedLossScale, ScaledTrainOneStepCell, ScheduledLossScale


@pytest.mark.parametrize(
    ("loss_scale", "names"),
    [
        (
            DynamicLossScale(),
            ["scale_factor", "scale_window", "backoff_factor", "hysteresis", "min_loss_scale", "max_loss_scale"],
        ),
        (ScheduledLossScale([2, 4], [8, 16]), ["milestone", "loss_scales"]),
    ],
)
def test_settings_of_an_update_rule(loss_scale, names):
    for rule in (loss_scale, copy.deepcopy(loss_scale)):
        for name in names:
            before = getattr(rule, name)
            with pytest.raises(AttributeError, match=f"'{name}' is fixed"):
                setattr(rule, name, 5)
            assert getattr(rule, name) == before


def test_whether_steps_are_skipped(mode):
    loss_scale = FixedLossScale(8.0)
    loss_scale.drop_overflow_update = False
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.01), loss_scale)
    cell(*batch(0))
    with pytest.raises(AttributeError, match="'drop_overflow_update' is fixed"):
        cell.loss_scale.drop_overflow_update = True
