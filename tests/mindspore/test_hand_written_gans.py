"""What a hand-written cell with two optimizers trains in each mode: docs/several_networks.md has a row for each."""

import pytest
from conftest import MODES
from mindspore import Parameter, Tensor, nn, ops
from support.in_mode import in_mode

from ms_lossscale import AlternatingTrainOneStepCell, SimultaneousTrainOneStepCell


class Times(nn.Cell):
    def __init__(self, factor, name):
        super().__init__()
        self.factor = Parameter(Tensor(factor), name=name)

    def construct(self, x):
        return self.factor * x


class Loss(nn.Cell):
    def __init__(self, generator, discriminator, target):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator, self.target = generator, discriminator, target

    def construct(self, x):
        return ops.square(self.discriminator(self.generator(x)) - self.target)


class HandWritten(nn.Cell):
    """As Pix2Pix's is written."""

    def __init__(self, losses, optimizers, set_grad):
        super().__init__(auto_prefix=False)
        self.d_loss, self.g_loss = losses
        self.d_optimizer, self.g_optimizer = optimizers
        self.d_loss.set_grad(set_grad), self.g_loss.set_grad(set_grad)
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, x):
        d_loss, g_loss = self.d_loss(x), self.g_loss(x)
        d_grads = self.grad(self.d_loss, self.d_optimizer.parameters)(x)
        d_loss = ops.depend(d_loss, self.d_optimizer(d_grads))
        g_grads = self.grad(self.g_loss, self.g_optimizer.parameters)(x)
        return d_loss, ops.depend(g_loss, self.g_optimizer(g_grads))


def gradient_of_the_generator(make_cell, *arguments):
    """2 * d * (d * 2 - 5): 6 with the discriminator's old factor d = 3, -5.25 with the new one, 1.75."""
    generator, discriminator = Times(2.0, "generator.factor"), Times(3.0, "discriminator.factor")
    losses = [Loss(generator, discriminator, target) for target in (1.0, 5.0)]
    optimizers = [nn.SGD(network.trainable_params(), 1 / 16) for network in (discriminator, generator)]
    make_cell(losses, optimizers, *arguments)(Tensor(1.0))
    return (2.0 - float(generator.factor)) * 16


@pytest.mark.parametrize("mode, with_set_grad, without", [("graph", 6.0, 6.0), ("pynative", 3.5, -5.25)])
def test_a_hand_written_cell_learns_like_one_of_ours_unless_set_grad_mixes_both(mode, with_set_grad, without):
    with in_mode(MODES[mode]):
        # 3.5 is no loss's gradient: values of the old discriminator times weights of the new one.
        assert gradient_of_the_generator(HandWritten, True) == with_set_grad
        assert gradient_of_the_generator(HandWritten, False) == without
        assert gradient_of_the_generator(SimultaneousTrainOneStepCell) == 6.0
        assert gradient_of_the_generator(AlternatingTrainOneStepCell) == -5.25
