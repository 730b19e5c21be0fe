"""Batches that no loss scale can mend, and training cells with an update rule that stands still for them, or not."""

import numpy as np
from mindspore import Tensor, nn, ops

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from support.retried_networks import LEARNING_RATE, Slope, inputs

# The gradient of a Slope is its second input, in float16, times the scale: 60 overflows above 2**10. Its forward is not
# finite if its first input, which goes into moving statistics alone, is not.
START = 2.0**12


def patient(scale=START, **keywords):
    return DynamicLossScale(scale, scale_window=3, backoff_if_loss_not_finite=False, **keywords)


def impatient():
    return DynamicLossScale(START, scale_window=3)


def good(slope=1.0, seed=0):
    return inputs(slope, seed=seed)


def steep():
    return inputs(60.0)


def bad():  # A batch whose loss is NaN at every scale.
    return Tensor(np.full((4, 3), np.nan, np.float32)), Tensor(np.float32(np.nan))


def bad_state():  # A batch that only what the forward writes shows.
    return Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.float32(1.0))


class StateOnly(Slope):  # Its loss does not see its first input.
    def construct(self, x, slope):
        return ops.depend((self.weight * slope).sum(), self.norm(x))


def trained(loss_scale, network=None, **keywords):
    network = network or Slope()
    return ScaledTrainOneStepCell(network, nn.SGD([network.weight], LEARNING_RATE), loss_scale, **keywords).set_train()


def pair(cell_class, loss_scale, networks=None, **keywords):
    networks = networks or [Slope(name) for name in "ab"]
    optimizers = [nn.SGD([network.weight], LEARNING_RATE) for network in networks]
    return cell_class(networks, optimizers, loss_scale, network_inputs=[(0, 1), (2, 3)], **keywords).set_train()
