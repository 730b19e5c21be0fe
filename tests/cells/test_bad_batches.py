"""Batches that no loss scale can mend: the law that stands still, and the reasons that skipped steps count for."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Tensor, ops
from mindspore import dtype as mstype
from support.npu_networks import BACKWARD, inputs_for, networks_on_npu, optimizers_of
from support.retried_networks import LEARNING_RATE, Penalised, Slope, inputs
from support.training import by_sgd

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, emulation

# The gradient of a Slope is its second input, in float16, times the scale: 60 overflows above 2**10. Its forward is not
# finite if its first input, which goes into moving statistics alone, is not.
START = 2.0**12
GOOD, STEEP = inputs(1.0), inputs(60.0)
# Its loss is NaN at every scale.
BAD = Tensor(np.full((4, 3), np.nan, np.float32)), Tensor(np.float32(np.nan))
# Only what the forward writes shows it.
BAD_STATE = Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.float32(1.0))


def patient(scale=START):
    return DynamicLossScale(scale, scale_window=3, backoff_if_loss_not_finite=False)


class StateOnly(Slope):  # Its loss does not see its first input.
    def construct(self, x, slope):
        product = self.weight.astype(mstype.float16) * slope.astype(mstype.float16)
        return ops.depend(product.astype(mstype.float32).sum(), self.norm(x))


def trained(loss_scale, network=None):
    return by_sgd(network or Slope(), loss_scale, LEARNING_RATE)


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode may lose second derivatives.
def test_a_scale_that_an_input_gradient_works_on_backs_off_as_ever(mode):
    loss_scale = patient(2.0**14)
    its = trained(loss_scale, Penalised(loss_scale))
    assert not np.isfinite(its(*GOOD)[0].asnumpy())
    assert its.get_loss_scale() == 2.0**13


@quick_in_pynative_mode
def test_a_detector_alone(mode):  # In saturation mode no gradient shows an overflow.
    with emulation.saturation_mode():
        (network,) = networks_on_npu(1)
        its = ScaledTrainOneStepCell(network, optimizers_of([network])[0], patient()).set_train()
        assert bool(its(*inputs_for(BACKWARD))[1])
    assert its.skip_reasons() == {"loss": 0, "forward_state": 0, "gradients": 0, "detector": 1}
    assert its.get_loss_scale() == START / 2


@quick_in_graph_mode
def test_reasons_add_up_to_the_skipped_steps_and_what_the_forward_wrote_counts_too(mode):
    its = trained(patient(), StateOnly())
    for each, scale in ((GOOD, START), (BAD, START), (BAD_STATE, START), (STEEP, START / 2), (BAD, START / 2)):
        assert bool(its(*each)[1]) is (each is not GOOD)
        assert its.get_loss_scale() == scale
    assert its.skip_reasons() == {"loss": 2, "forward_state": 1, "gradients": 1, "detector": 0}
    assert its.counters()["skipped_steps"] == 4


def test_the_law_in_stock_cells_does_not_know_of_losses():
    loss_scale = patient()
    loss_scale.adjust(Tensor(False))
    assert loss_scale.get_loss_scale() == START / 2
