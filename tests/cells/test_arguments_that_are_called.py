"""Cells that a step calls with a known number of inputs are refused if they surely can't be called so."""

import functools

import pytest
from mindspore import Tensor, amp, jit, nn
from support.networks import Linear

from ms_lossscale import OverflowDetector, ScaledTrainOneStepCell
from ms_lossscale._signatures import takes


def construct(self, x, mask=None):
    return x


class Plain(nn.Cell):
    construct = construct


class Compiled(nn.Cell):
    construct = jit(construct)


class AnyNumber(nn.Cell):
    def construct(self, x, *rest):
        return x


class ByKeyword(nn.Cell):
    def construct(self, x, *, y, z=None):
        return x


def with_one_more(function):
    """A decorator that calls the function with another number of inputs than it takes itself."""

    @functools.wraps(function)
    def call(self, *inputs):
        return function(self, *inputs[:1])

    return call


class Decorated(nn.Cell):
    construct = with_one_more(construct)


class OwnCall(nn.Cell):
    construct = construct

    def __call__(self, *inputs):
        return super().__call__(inputs[0])


class Static(nn.Cell):
    construct = staticmethod(lambda x: x)


class Trap(nn.Cell):
    """Nothing of it may run."""

    @property
    def construct(self):
        raise AssertionError("it was executed")


def hooked():
    cell = Plain()
    cell.register_forward_pre_hook(lambda cell, inputs: inputs[:1])
    return cell


def written(cell):
    its = takes(cell)
    return its and its.written()


def test_what_is_certain_is_told():
    assert written(Plain()) == written(Compiled()) == "1 to 2 inputs (x, mask)"
    assert written(AnyNumber()) == "1 or more inputs (x)"
    assert written(ByKeyword()) == "1 input (x) and by keyword y"
    assert written(nn.WithLossCell(Plain(), nn.MSELoss())) == "2 inputs (data, label)"
    assert [takes(Plain()).fits(count) for count in range(4)] == [False, True, True, False]
    assert [takes(AnyNumber()).fits(count) for count in range(4)] == [False, True, True, True]
    assert not any(takes(ByKeyword()).fits(count) for count in range(4))


def test_what_amp_replaces_is_read_through():
    assert written(amp.auto_mixed_precision(Plain(), "auto")) == "1 to 2 inputs (x, mask)"
    assert written(amp.auto_mixed_precision(Plain(), "O1")) == "1 to 2 inputs (x, mask)"


@pytest.mark.parametrize("make", [Decorated, OwnCall, Static, Trap, hooked])
def test_what_is_not_certain_is_not(make):
    its = takes(make())
    assert its is None or all(its.fits(count) for count in range(4))


class TwoInputs(OverflowDetector):
    def construct(self, grads, scale):
        return grads


class Ema(nn.Cell):
    def update(self, weights):
        return weights

    def nothing(self):
        return Tensor(0)


@pytest.mark.parametrize(
    "keyword, value, words",
    [
        ("after_update", nn.Dense(2, 2), "is called without inputs, but Dense.* takes 1 input"),
        ("after_update", Ema().update, r"is called without inputs, but .*update.* takes 1 input \(weights\)"),
        ("after_update", Ema(), "'Ema' does not define 'construct'"),
        ("after_update", nn.CellList([Ema()]), "'CellList' does not define 'construct'"),
        ("gradient_transforms", [nn.MSELoss()], r"is called with one input, but MSELoss.* takes 2 inputs"),
        ("gradient_transforms", [nn.Cell()], "'Cell' does not define 'construct'"),
        (
            "overflow_detector",
            TwoInputs(),
            r"is called with one input, but TwoInputs.* takes 2 inputs \(grads, scale\)",
        ),
    ],
)
def test_what_can_not_be_called_is_refused(keyword, value, words):
    network = Linear()
    with pytest.raises(TypeError, match=f"For 'ScaledTrainOneStepCell', the argument '{keyword}.*{words}"):
        ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), **{keyword: value})


@pytest.mark.parametrize("value", [Ema().nothing, Decorated(), hooked(), AnyNumber()])
def test_what_may_be_called_is_not(value):
    network = Linear()
    ScaledTrainOneStepCell(
        network, nn.SGD(network.trainable_params()), gradient_transforms=[value] if isinstance(value, nn.Cell) else []
    )
