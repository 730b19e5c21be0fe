"""Two optimizers in the wrong order: no gradient reaches the weights of one of them, which is said."""

import warnings

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import Tensor, nn, ops
from support.networks import weight

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, SimultaneousTrainOneStepCell

ROWS = np.float32([[1, 2], [3, 4]])


class Matrix(nn.Cell):
    def __init__(self, name):
        super().__init__()
        self.weight = weight(2, 2, seed=1, name=f"{name}.weight")

    def construct(self, x):
        return ops.matmul(x, self.weight)


class GeneratorLoss(nn.Cell):
    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator

    def construct(self, x):
        return ops.square(self.discriminator(self.generator(x)) - 1.0).mean()


class DiscriminatorLoss(GeneratorLoss):
    def construct(self, x):
        fake = ops.stop_gradient(self.generator(x))
        return (ops.square(self.discriminator(x) - 1.0) + ops.square(self.discriminator(fake))).mean()


def gan(cell_class=SimultaneousTrainOneStepCell, swapped=True, loss_scale=None, optimizer=nn.SGD, **keywords):
    networks = Matrix("generator"), Matrix("discriminator")
    optimizers = [optimizer(network.trainable_params(), 0.01) for network in networks]
    losses = [DiscriminatorLoss(*networks), GeneratorLoss(*networks)]
    order = optimizers if swapped else optimizers[::-1]
    return cell_class(losses, order, loss_scale or DynamicLossScale(2.0**10), **keywords).set_train()


@quick_in_graph_mode
@pytest.mark.parametrize("cell_class", [SimultaneousTrainOneStepCell, *slow(AlternatingTrainOneStepCell)])
def test_training(mode, cell_class):
    swapped, right = gan(cell_class), gan(cell_class, swapped=False)
    says = "no weight of optimizer 0 has changed since the first call: .* Loss i trains the weights of optimizer i: are"
    with pytest.warns(RuntimeWarning, match=says):
        for _ in range(50):
            swapped(Tensor(ROWS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            right(Tensor(ROWS))
