"""A rule that stands still where the forward was not finite, beyond what the configurations draw."""

import numpy as np
import pytest
from mindspore import Tensor
from support.retried_networks import LEARNING_RATE, Penalised, inputs
from support.training import by_sgd

from ms_lossscale import DynamicLossScale


def patient(scale):
    return DynamicLossScale(scale, backoff_if_loss_not_finite=False)


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode may lose second derivatives.
def test_a_scale_that_an_input_gradient_works_on_backs_off_as_ever(mode):
    loss_scale = patient(2.0**14)
    its = by_sgd(Penalised(loss_scale), loss_scale, LEARNING_RATE)
    assert not np.isfinite(its(*inputs(1.0))[0].asnumpy())
    assert its.get_loss_scale() == 2.0**13


def test_the_law_in_stock_cells_does_not_know_of_losses():
    loss_scale = patient(2.0**12)
    loss_scale.adjust(Tensor(False))
    assert loss_scale.get_loss_scale() == 2.0**11
