"""What a compiled step would not hear of can't be set."""

import copy
import inspect
import re

import pytest
from conftest import quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn
from support.networks import Linear, batch, overflowing_batch

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    FixedLossScale,
    ScaledTrainOneStepCell,
    ScheduledLossScale,
    SimultaneousTrainOneStepCell,
)


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


def _training_cell(cell_class, scale=8.0, **keywords):
    networks = [Linear(), Linear()]
    networks[1].weight.name = "other"
    optimizers = [nn.Adam([network.weight], 0.01) for network in networks]
    if issubclass(cell_class, ScaledTrainOneStepCell):
        networks, optimizers = networks[0], optimizers[0]
    return cell_class(networks, optimizers, DynamicLossScale(scale), **keywords), networks, optimizers


TRAINING_CELLS = [ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell]


@pytest.mark.parametrize("cell_class", TRAINING_CELLS)
@quick_in_pynative_mode
def test_what_a_training_cell_was_built_from(mode, cell_class):
    cell, _, _ = _training_cell(cell_class)
    stock = ["network", "optimizer", "sens", "return_grad", "weights", "grad_reducer", "scale_sense"]
    names = {*inspect.signature(cell_class).parameters, *stock}
    assert {"loss_scale", "clip_norm", "max_retries"} < names
    before = list(cell.parameters_dict())
    for name in names:
        for value in (2, None, nn.SGD([Linear().weight], 0.1), Parameter(Tensor(2.0), name="new"), [Tensor(2.0)]):
            if value is getattr(cell, name, "nothing"):
                continue
            with pytest.raises(AttributeError, match=f"For '{cell_class.__name__}', '{name}' is fixed.*") as error:
                setattr(cell, name, value)
            instead = "set_every" if name == "every" else "Construct a new cell .*load_state_dict"
            assert re.search(instead, str(error.value))
            assert ("set_loss_scale(value)" in str(error.value)) == (name in ("loss_scale", "scale_sense", "sens"))
    assert list(cell.parameters_dict()) == before
    # MindSpore's own functions, and what is there already.
    assert cell.set_train().training and not cell.set_train(False).training
    cell.phase, cell.network, cell.optimizer = "train", cell.network, cell.optimizer


class TrainingCellOfAUser(ScaledTrainOneStepCell):
    """Has attributes, arguments and Cells of its own, and repeats what stock subclasses do."""

    def __init__(self, network, optimizer, loss_scale, settings=()):
        super().__init__(network, optimizer, loss_scale)
        self.network, self.optimizer, self.loss_scale = network, optimizer, loss_scale
        self.settings, self.every, self.metric = settings, 5, nn.Identity()


def test_own_attributes_of_a_users_training_cell():
    cell, network, _ = _training_cell(TrainingCellOfAUser)
    cell.settings, cell.label = [1], "a"
    assert (cell.settings, cell.every, cell.label, cell.network) == ([1], 5, "a", network)
    with pytest.raises(AttributeError, match="For 'TrainingCellOfAUser', 'clip_norm' is fixed"):
        cell.clip_norm = 1.0


@pytest.mark.parametrize("cell_class", TRAINING_CELLS)
@quick_in_pynative_mode
def test_a_new_cell_continues_as_the_message_says(mode, cell_class):
    cell, networks, optimizers = _training_cell(cell_class, ema_decay=0.9)
    cell(*batch(0))
    cell(*overflowing_batch(0))
    again = cell_class(networks, optimizers, DynamicLossScale(2.0), ema_decay=0.9, clip_norm=1e-3)
    again.load_state_dict(cell.parameters_dict(), strict=False)
    assert again.counters() == cell.counters() and again.get_loss_scale() == cell.get_loss_scale()
    averages = again.ema_parameters()
    for name, average in cell.ema_parameters().items():
        assert (averages[name].asnumpy() == average.asnumpy()).all()
    assert averages.keys() == cell.ema_parameters().keys()
