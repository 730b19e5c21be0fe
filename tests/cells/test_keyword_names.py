"""Keywords that are called otherwise elsewhere, or misspelt, are named with the one that was meant."""

import inspect

import pytest
from mindspore import nn
from support.networks import Linear

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ManualStep,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    build_train_network,
)

NETWORK = Linear()
SGD = nn.SGD(NETWORK.trainable_params(), 0.1)


@pytest.mark.parametrize(
    "make, name, meant",
    [
        (ScaledTrainOneStepCell, "scale_sense", "loss_scale"),
        (ScaledTrainOneStepCell, "loss_scale_manager", "loss_scale"),
        (ScaledTrainOneStepCell, "accumulation_steps", "gradient_accumulation_steps"),
        (ScaledTrainOneStepCell, "max_grad_norm", "clip_norm"),
        (ScaledTrainOneStepCell, "gradient_acumulation_steps", "gradient_accumulation_steps"),
        (SimultaneousTrainOneStepCell, "scale_sense", "loss_scale"),
        (AlternatingTrainOneStepCell, "accumulation_steps", "gradient_accumulation_steps"),
        (ManualStep, "scaler", "loss_scale"),
        (build_train_network, "scale_sense", "loss_scale_manager"),
        (build_train_network, "loss_scale", "loss_scale_manager"),
        (build_train_network, "accumulation_steps", "gradient_accumulation_steps"),
    ],
)
def test_the_one_that_was_meant_is_named(make, name, meant):
    words = f"For '{make.__name__}', there is no argument '{name}'. Did you mean '{meant}'?"
    with pytest.raises(ValueError if make is build_train_network else TypeError) as raised:
        make(NETWORK, SGD, **{name: 2})
    assert str(raised.value) == words


@pytest.mark.parametrize(
    "name, meant",
    [
        ("scale_value", "init_loss_scale"),
        ("init_scale", "init_loss_scale"),
        ("growth_interval", "scale_window"),
        ("growth_factor", "scale_factor"),
    ],
)
def test_loss_scales_name_it_too(name, meant):
    words = f"For 'DynamicLossScale', there is no argument '{name}'. Did you mean '{meant}'?"
    with pytest.raises(TypeError) as raised:
        DynamicLossScale(**{name: 2})
    assert str(raised.value) == words


@pytest.mark.parametrize(
    "make, name, instead",
    [
        (ManualStep, "max_retries", "call begin, your forward and backward, and end again"),
        (ManualStep, "has_aux", "is yours"),
        (ManualStep, "weighted", "end(grads, weight=n)"),
        (SimultaneousTrainOneStepCell, "every", "AlternatingTrainOneStepCell has turns"),
    ],
)
def test_what_another_class_takes(make, name, instead):
    with pytest.raises(TypeError) as raised:
        make([NETWORK], [SGD], **{name: 2})
    message = str(raised.value)
    assert message.startswith(f"For '{make.__name__}', there is no argument '{name}'. ") and instead in message


def test_what_nobody_meant_is_pythons_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'"):
        ScaledTrainOneStepCell(NETWORK, SGD, xyz=1)
    with pytest.raises(ValueError, match="Unsupported arg 'xyz'"):
        build_train_network(NETWORK, SGD, xyz=1)


class TakesScaleSense(ScaledTrainOneStepCell):
    def __init__(self, network, optimizer, scale_sense):
        super().__init__(network, optimizer, scale_sense)


class PassesOn(ScaledTrainOneStepCell):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_a_subclass_may_have_keywords_of_its_own():
    assert TakesScaleSense(NETWORK, SGD, scale_sense=DynamicLossScale(8.0)).get_loss_scale() == 8.0
    assert PassesOn(NETWORK, SGD, loss_scale=4.0).get_loss_scale() == 4.0


def test_the_signatures_are_those_of_the_constructors():
    for cell in (ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell, ManualStep):
        assert list(inspect.signature(cell).parameters) == list(inspect.signature(cell.__init__).parameters)[1:]
