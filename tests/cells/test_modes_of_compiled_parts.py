"""In PyNative mode, what is compiled there follows `set_train` and `to_float` at each call, too."""

import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, InputGradient, SimultaneousTrainOneStepCell

X = Tensor(np.random.default_rng(0).normal(3, 1, (8, 4)).astype(np.float32))
# In float16, 2049 is 2048.
EXACT, ROUNDED = 2049.0, 2048.0


class TwoLosses(nn.Cell):
    """One network with two losses, a BatchNorm and a product."""

    def __init__(self):
        super().__init__()
        self.norm, self.product = nn.BatchNorm1d(4, affine=False), product()
        self.other = Parameter(Tensor([1.0], mstype.float32), name="other")

    def construct(self, x):
        loss = self.product(ops.ones_like(x[:1, :1])).astype(mstype.float32)
        return ops.depend(loss, self.norm(x)).sum(), (self.other * self.other).sum()


def product():
    return nn.Dense(1, 1, weight_init=Tensor([[EXACT]], mstype.float32), has_bias=False)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("keywords", [{}, *slow({"gradient_accumulation_steps": 2}, {"max_retries": 1})])
def test_a_network_with_several_losses(mode, keywords):
    network = TwoLosses()
    optimizers = [nn.SGD([weight], 2.0**-20) for weight in (network.product.weight, network.other)]
    cell = SimultaneousTrainOneStepCell(network, optimizers, DynamicLossScale(2.0), **keywords)
    means = [network.norm.moving_mean.asnumpy().copy()]

    def moves():
        losses = cell(X)[3].asnumpy()
        means.append(network.norm.moving_mean.asnumpy().copy())
        return not np.array_equal(means[-1], means[-2]), losses[0]

    # As `Model.train` does, it sets the mode only after the first loss scale is found.
    cell.find_loss_scale(X)
    cell.set_loss_scale(2.0)
    assert not moves()[0]
    cell.set_train()
    assert moves()[0] and moves()[0]
    cell.set_train(False)
    assert not moves()[0]
    cell.set_train()
    assert moves() == (True, EXACT)
    network.product.to_float(mstype.float16)
    assert moves() == (True, ROUNDED)
    network.product.to_float(mstype.float32)
    assert moves() == (True, EXACT)


class Quadratic(nn.Cell):
    """Its gradient is EXACT times the input, or ROUNDED; in evaluation it is 1."""

    def __init__(self):
        super().__init__()
        self.product = product()

    def construct(self, x):
        return self.product(x).astype(mstype.float32) if self.training else x.sum()


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_an_input_gradient(mode):
    network = Quadratic()
    gradient, x = InputGradient(network), Tensor([[1.0]], mstype.float32)
    for is_training, dtype, wanted in (
        (False, mstype.float32, 1.0),
        (True, mstype.float32, EXACT),
        (True, mstype.float16, ROUNDED),
        (True, mstype.float32, EXACT),
        (False, mstype.float32, 1.0),
    ):
        network.set_train(is_training)
        network.product.to_float(dtype)
        np.testing.assert_array_equal(gradient(x).asnumpy(), [[wanted]])
