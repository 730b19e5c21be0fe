"""In PyNative mode a user's own cell runs in Python, as it is written, in each step; the rest is compiled."""

import mindspore
import pytest
from mindspore import nn, ops
from support.in_mode import in_mode
from support.networks import Linear, batch

from ms_lossscale import DynamicLossScale, FiniteGradients, ScaledTrainOneStepCell


@pytest.fixture(autouse=True)
def pynative_mode():
    with in_mode(mindspore.PYNATIVE_MODE):
        yield


class OwnOptimizer(nn.Optimizer):
    """Gradient descent."""

    def __init__(self, parameters, learning_rate):
        super().__init__(learning_rate, parameters)
        self.runs = 0

    def construct(self, grads):
        self.runs += 1
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, self.get_lr() * grad)


class Counts:
    """Mixed into a cell, counts how often Python runs it."""

    runs = 0

    def construct(self, *inputs):
        self.runs += 1
        return super().construct(*inputs)


class OwnDetector(Counts, FiniteGradients):
    pass


class OwnScale(DynamicLossScale):
    runs = 0

    def next_scale(self, loss_scale, overflow):
        self.runs += 1
        return super().next_scale(loss_scale, overflow)


class Nothing(nn.Cell):
    def construct(self):
        pass


class AfterUpdate(Counts, Nothing):
    pass


class Unchanged(nn.Cell):
    def construct(self, grads):
        return grads


class OwnTransform(Counts, Unchanged):
    pass


def train(steps=3, *, optimizer=nn.SGD, loss_scale=DynamicLossScale, **keywords):
    network = Linear()
    cell = ScaledTrainOneStepCell(network, optimizer(network.trainable_params(), 0.1), loss_scale(), **keywords)
    for i in range(steps):
        cell(*batch(i))
    cell.flush()
    return cell


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_they_run_in_each_step(accumulated, clip_norm):
    steps = 3 * accumulated
    own = [OwnDetector(), AfterUpdate(), OwnTransform()]
    keywords = {"overflow_detector": own[0], "after_update": own[1], "gradient_transforms": [own[2]]}
    cell = train(
        steps,
        optimizer=OwnOptimizer,
        loss_scale=OwnScale,
        gradient_accumulation_steps=accumulated,
        clip_norm=clip_norm,
        **keywords,
    )
    assert [cell.optimizer.runs, cell.loss_scale.runs, own[1].runs, own[2].runs] == [3, 3, 3, 3]
    # Each call is looked at, and the mean of a cycle.
    assert own[0].runs == (steps if accumulated == 1 else steps + 3)
