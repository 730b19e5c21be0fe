"""Batches that no loss scale can mend: the law that stands still, and the reasons that skipped steps count for."""

import numpy as np
import pytest
from conftest import in_pairs, quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, nn
from support.bad_batches import START, StateOnly, bad, bad_state, good, impatient, pair, patient, steep, trained
from support.npu_networks import BACKWARD, inputs_for, networks_on_npu, optimizers_of
from support.retried_networks import LEARNING_RATE, Penalised, Slope, inputs
from support.sloped_networks import manual, with_norm
from support.training import bookkeeping, changed, state

from ms_lossscale import ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, emulation


@quick_in_pynative_mode
def test_a_batch_that_no_scale_mends_leaves_the_scale_alone(mode):
    its, stock = trained(patient()), trained(impatient())
    for each in (its, stock):
        before = state(each)
        each(*good())
        assert bool(each(*bad())[1])
        after = state(each)
        assert changed(before, after) - {"slope.weight", "slope.calls", "global_step"} - bookkeeping(before) == {
            name for name in before if "moving" in name
        }
    assert (its.get_loss_scale(), stock.get_loss_scale()) == (START, START / 2)
    # The law stands still altogether: two clean steps on either side make three.
    assert int(its.loss_scale.clean_steps.asnumpy()) == 1
    its(*good()), its(*good())
    assert its.get_loss_scale() == 2 * START
    # An overflow of the backward lowers the scale as ever.
    assert bool(its(*steep())[1]) and its.get_loss_scale() == START
    assert its.skip_reasons() == {"loss": 1, "forward_state": 0, "gradients": 1, "detector": 0}
    assert its.counters()["skipped_steps"] == 2


@quick_in_pynative_mode
@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_scales_of_their_own_look_at_their_own_losses(mode, steps):
    networks = [StateOnly("a"), Slope("b")]
    its = pair(SimultaneousTrainOneStepCell, [patient(), patient()], networks, gradient_accumulation_steps=steps)
    for _ in range(steps):
        its(*bad(), *steep())
    assert its.get_loss_scale() == [START, START / 2]
    for _ in range(steps):
        its(*good(), *inputs(100.0))
    assert its.get_loss_scale() == [START, START / 4]
    # Only what the forward wrote shows the third overflow: of which network it is nobody knows.
    for _ in range(steps):
        its(*bad_state(), *good())
    assert its.get_loss_scale() == [START, START / 4]
    assert its.skip_reasons() == {"loss": 1, "forward_state": 1, "gradients": 1, "detector": 0}


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode may lose second derivatives.
def test_a_scale_that_an_input_gradient_works_on_backs_off_as_ever(mode):
    loss_scale = patient(2.0**14)
    network = Penalised(loss_scale)
    optimizer = nn.SGD([network.inner.weight], LEARNING_RATE)
    its = ScaledTrainOneStepCell(network, optimizer, loss_scale).set_train()
    assert not np.isfinite(its(*good())[0].asnumpy())
    assert its.get_loss_scale() == 2.0**13


@in_pairs
def test_a_manual_step_is_told_by_its_loss(mode, how):
    step, train_step = manual(patient(), how)
    train_step(with_norm(1.0))
    assert bool(train_step(with_norm(np.nan))[1])
    assert step.get_loss_scale() == START
    assert step.skip_reasons()["loss"] == 1


@quick_in_pynative_mode
def test_a_detector_alone(mode):  # In saturation mode no gradient shows an overflow.
    with emulation.saturation_mode():
        (network,) = networks_on_npu(1)
        (optimizer,) = optimizers_of([network])
        its = ScaledTrainOneStepCell(network, optimizer, patient()).set_train()
        assert bool(its(*inputs_for(BACKWARD))[1])
    assert its.skip_reasons() == {"loss": 0, "forward_state": 0, "gradients": 0, "detector": 1}
    assert its.get_loss_scale() == START / 2


@quick_in_graph_mode
def test_reasons_add_up_to_the_skipped_steps(mode):
    its = trained(impatient())
    for each in (good, bad, steep, bad_state, bad, good):
        its(*each())
    reasons = its.skip_reasons()
    assert sum(reasons.values()) == its.counters()["skipped_steps"] == 4
    assert reasons["loss"] == 3 and reasons["gradients"] == 1


def test_the_law_in_stock_cells_does_not_know_of_losses():
    loss_scale = patient()
    loss_scale.adjust(Tensor(False))
    assert loss_scale.get_loss_scale() == START / 2
