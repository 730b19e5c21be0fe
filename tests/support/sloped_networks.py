"""A network whose gradient is its input, so that NumPy follows its training exactly."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import ManualStep, ScaledTrainOneStepCell
from support.training import stepping

LEARNING_RATE = 2.0**-6


class Slopes(nn.Cell):
    """The loss is `sum(weight * x)`, so that its gradient is `x`. It moves BatchNorm's statistics besides."""

    def __init__(self, name="slopes"):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(4, np.float32)), name=f"{name}.weight")
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.norm.update_parameters_name(f"{name}.")

    def construct(self, x):
        normed = ops.stop_gradient(self.norm(x.reshape((2, 2))))
        return (self.weight * x).sum() + 0.0 * normed.sum()


def sgd(network):
    return nn.SGD([network.weight], LEARNING_RATE)


def with_norm(norm):  # An input whose gradient has exactly this norm.
    return Tensor(np.full(4, norm / 2, np.float32))


def cell(loss_scale, network=None, **keywords):
    network = network or Slopes()
    return ScaledTrainOneStepCell(network, sgd(network), loss_scale, **keywords).set_train()


def manual(loss_scale, how="eagerly", network=None, **keywords):
    """Returns a ManualStep, and a function that makes a step and returns loss and overflow."""
    network = network or Slopes()
    step = ManualStep(network, sgd(network), loss_scale, **keywords).set_train()
    return step, stepping(step, network, how, tells_loss=True)
