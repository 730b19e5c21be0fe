"""In PyNative mode a user's own cell runs in Python, as it is written, in each step; the rest is compiled."""

import pytest
from mindspore import nn, ops
from support.networks import Linear, batch

from ms_lossscale import DynamicLossScale, FiniteGradients, ScaledTrainOneStepCell


class OwnOptimizer(nn.Optimizer):
    """Gradient descent."""

    def __init__(self, parameters, learning_rate):
        super().__init__(learning_rate, parameters)
        self.runs = 0

    def construct(self, grads):
        self.runs += 1
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, self.get_lr() * grad)


class OwnDetector(FiniteGradients):
    runs = 0

    def construct(self, grads):
        self.runs += 1
        return super().construct(grads)


class OwnScale(DynamicLossScale):
    runs = 0

    def next_scale(self, loss_scale, overflow):
        self.runs += 1
        return super().next_scale(loss_scale, overflow)


class AfterUpdate(nn.Cell):
    runs = 0

    def construct(self):
        self.runs += 1


class OwnTransform(nn.Cell):
    runs = 0

    def construct(self, grads):
        self.runs += 1
        return grads


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_they_run_in_each_step(mode, steps, clip_norm):
    network, detector, after, transform, scale = Linear(), OwnDetector(), AfterUpdate(), OwnTransform(), OwnScale()
    own = {"overflow_detector": detector, "after_update": after, "gradient_transforms": [transform]}
    optimizer, keywords = OwnOptimizer(network.trainable_params(), 0.1), {"gradient_accumulation_steps": steps, **own}
    cell = ScaledTrainOneStepCell(network, optimizer, scale, clip_norm=clip_norm, **keywords)
    for i in range(3 * steps):
        cell(*batch(i))
    assert [optimizer.runs, scale.runs, after.runs, transform.runs] == [3, 3, 3, 3]
    # Each call is looked at, and the mean of a cycle.
    assert detector.runs == 3 * (1 if steps == 1 else steps + 1)
