"""A wrong answer of a user's own cell, an update rule, a detector or a critic, is an error that says what is right."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.networks import Linear, batch

from ms_lossscale import InputGradient, LossScale, OverflowDetector, ScaledTrainOneStepCell


class Answers(OverflowDetector):
    """Gives one answer, whatever the gradients are."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def construct(self, grads):
        return ops.depend(self.answer, grads) if isinstance(self.answer, Tensor) else self.answer


class Returns(LossScale):
    """Returns one value after each step."""

    def __init__(self, value):
        super().__init__(8.0)
        self.value = value

    def next_scale(self, loss_scale, overflow):
        return ops.depend(self.value, loss_scale) if isinstance(self.value, Tensor) else self.value


def cell_of(steps=1, **keywords):
    network = Linear()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    return ScaledTrainOneStepCell(network, optimizer, gradient_accumulation_steps=steps, **keywords).set_train()


def run_in_a_cell(loss_scale, steps):
    cell = cell_of(steps, loss_scale=loss_scale)
    for _ in range(steps):
        cell(*batch())


USES = {
    "cell": lambda loss_scale: run_in_a_cell(loss_scale, 1),
    "cycle": lambda loss_scale: run_in_a_cell(loss_scale, 2),
    "loop": lambda loss_scale: loss_scale.adjust(Tensor(True)),
    "mindspore": lambda loss_scale: loss_scale(loss_scale.scale_value, Tensor(False)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("value", "error"), [(Tensor(np.float32([16.0, 32.0])), ValueError), (16.0, TypeError)], ids=["two", "a number"]
)
def test_an_update_rule(mode, use, value, error):
    with pytest.raises(error, match=r"'Returns', 'next_scale' must return the next step's scale"):
        USES[use](Returns(value))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("answer", "error"), [(Tensor([True, False]), ValueError), (False, TypeError)], ids=["of each element", "no tensor"]
)
def test_a_detector(mode, steps, answer, error):
    cell = cell_of(steps, loss_scale=1024.0, overflow_detector=Answers(answer))
    with pytest.raises(error, match=r"'Answers', 'construct' must return one answer"):
        cell(*batch())


class Two(nn.Cell):
    def construct(self, x):
        return x, x


def test_a_critic(mode):
    message = r"'InputGradient', the network must return one Tensor, but it returned \(Tensor of shape \(2,\), Tensor"
    with pytest.raises(TypeError, match=message):
        InputGradient(Two())(Tensor([1.0, 2.0]))
