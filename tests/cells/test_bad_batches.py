"""Batches that no loss scale can mend: the law that stands still, and the reasons that skipped steps count for."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from support.npu_networks import BACKWARD, inputs_for, networks_on_npu, optimizers_of
from support.retried_networks import LEARNING_RATE, Penalised, Slope, inputs
from support.sloped_networks import manual, with_norm
from support.training import bookkeeping, changed, state

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    emulation,
)

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


def bad():
    """Returns a batch whose loss is NaN at every scale."""
    return Tensor(np.full((4, 3), np.nan, np.float32)), Tensor(np.float32(np.nan))


def bad_state():
    """Returns a batch that only what the forward writes shows."""
    return Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.float32(1.0))


class StateOnly(Slope):
    """Its loss does not see its first input."""

    def construct(self, x, slope):
        return ops.depend((self.weight * slope).sum(), self.norm(x))


def trained(loss_scale, network=None, **keywords):
    network = network or Slope()
    return ScaledTrainOneStepCell(network, nn.SGD([network.weight], LEARNING_RATE), loss_scale, **keywords).set_train()


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


def test_what_the_forward_wrote_counts_too(mode):
    its = trained(patient(), StateOnly())
    assert bool(its(*bad_state())[1])
    assert its.get_loss_scale() == START
    assert its.skip_reasons()["forward_state"] == 1


def test_training_goes_on_where_every_third_batch_is_bad(mode):
    """The scale is where it would be without them, and so are the weights."""
    with_bad, without = trained(patient()), trained(patient())
    for seed in range(12):
        if seed % 3 == 2:
            with_bad(*bad())
        with_bad(*good(seed=seed))
        without(*good(seed=seed))
    different = changed(state(with_bad), state(without))
    # The last bad batch is still named.
    counted = {f"step_counters.{name}" for name in ("skipped_steps", "skip_reasons", "overflowed")}
    assert different == counted


@pytest.mark.parametrize("retries", [0, *slow(3)])
@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ((good, bad), START),
        ((bad, good), START),
        ((bad, steep), START / 2),
        ((steep, bad), START / 2),
        ((steep, good), START / 2),
        ((good, steep), START / 2),
    ],
    ids=lambda its: "-".join(each.__name__ for each in its) if isinstance(its, tuple) else "",
)
def test_a_cycle_backs_off_if_a_call_overflowed_whose_loss_was_finite(mode, calls, wanted, retries):
    its = trained(patient(hysteresis=1), gradient_accumulation_steps=2, max_retries=retries)
    for each in calls:
        _, overflow, _ = its(*each())
    if retries and bad not in calls:
        # Tried again at a lower scale, so that nothing is lost.
        assert not bool(overflow) and its.get_loss_scale() < START
        return
    assert bool(overflow)
    if retries and steep in calls and calls[0] is steep:
        # The call before the lost one was tried again, and what its attempts lowered stays.
        assert its.get_loss_scale() < START
    else:
        assert its.get_loss_scale() == wanted
    assert its.skip_reasons()["loss"] == (bad in calls)
    # Nothing of it is left in the next cycle.
    its(*good()), its(*good())
    assert its.counters()["applied_steps"] == 1


def test_a_flushed_cycle(mode):
    its = trained(patient(), gradient_accumulation_steps=3)
    for calls, wanted in (((good, bad), START), ((bad, steep), START / 2)):
        for each in calls:
            its(*each())
        its.flush()
        assert its.get_loss_scale() == wanted
    assert its.skip_reasons()["loss"] == its.counters()["skipped_steps"] == 2


def test_a_retried_step_looks_at_its_first_try(mode):
    """A bad batch is not tried again, and one that is tried in vain counts as one overflow."""
    its = trained(patient(), max_retries=2)
    its(*bad())
    assert (its.get_loss_scale(), its.counters()["retries"]) == (START, 0)
    # 2**15 overflows at every scale that is tried.
    its(*inputs(2.0**14))
    assert (its.get_loss_scale(), its.counters()["retries"]) == (START / 2, 2)


def pair(cell_class, loss_scale, networks=None, **keywords):
    networks = networks or [Slope(name) for name in "ab"]
    optimizers = [nn.SGD([network.weight], LEARNING_RATE) for network in networks]
    return cell_class(networks, optimizers, loss_scale, network_inputs=[(0, 1), (2, 3)], **keywords).set_train()


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
    assert its.skip_reasons() == {"loss": 1, "forward_state": 0, "gradients": 1, "detector": 0}
    # Only what the forward wrote shows the third overflow: of which network it is nobody knows.
    for _ in range(steps):
        its(*bad_state(), *good())
    assert its.get_loss_scale() == [START, START / 4]


@quick_in_pynative_mode
def test_one_patient_scale_of_two(mode):
    its = pair(SimultaneousTrainOneStepCell, [impatient(), patient()])
    its(*bad(), *bad())
    assert its.get_loss_scale() == [START / 2, START]


def test_networks_that_decide_alone(mode):
    its = pair(AlternatingTrainOneStepCell, patient())
    its(*bad(), *steep())
    assert its.get_loss_scale() == [START, START / 2]
    assert [reasons["loss"] for reasons in its.skip_reasons()] == [1, 0]


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode may lose second derivatives.
def test_a_scale_that_an_input_gradient_works_on_backs_off_as_ever(mode):
    loss_scale = patient(2.0**14)
    network = Penalised(loss_scale)
    optimizer = nn.SGD([network.inner.weight], LEARNING_RATE)
    its = ScaledTrainOneStepCell(network, optimizer, loss_scale).set_train()
    assert not np.isfinite(its(*good())[0].asnumpy())
    assert its.get_loss_scale() == 2.0**13


@pytest.mark.parametrize("how", ["eagerly", "in_jit"])
def test_a_manual_step_is_told_by_its_loss(mode, how):
    step, train_step = manual(patient(), how)
    train_step(with_norm(1.0))
    assert bool(train_step(with_norm(np.nan))[1])
    assert step.get_loss_scale() == START
    assert step.skip_reasons()["loss"] == 1


@quick_in_pynative_mode
def test_it_resumes_within_a_cycle(mode):
    first, second = (trained(patient(), gradient_accumulation_steps=3) for _ in "ab")
    for each in (bad, good):
        first(*each())
    second.load_state_dict({name: Tensor(value) for name, value in state(first).items()})
    for its in (first, second):
        its(*good())
    assert not changed(state(first), state(second))
    assert first.get_loss_scale() == START


def test_a_detector_alone(mode):
    """In saturation mode no gradient shows an overflow."""
    with emulation.saturation_mode():
        (network,) = networks_on_npu(1)
        (optimizer,) = optimizers_of([network])
        its = ScaledTrainOneStepCell(network, optimizer, patient()).set_train()
        assert bool(its(*inputs_for(BACKWARD))[1])
    assert its.skip_reasons() == {"loss": 0, "forward_state": 0, "gradients": 0, "detector": 1}
    assert its.get_loss_scale() == START / 2


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


@pytest.mark.parametrize("later", [(steep, good), (bad, good)], ids=["steep", "bad"])
def test_a_cycle_is_judged_without_the_one_before(mode, later):
    """Of the losses that were not finite, and of the calls that overflowed although theirs were."""
    its = trained(patient(), gradient_accumulation_steps=2)
    earlier = (steep, good) if later[0] is bad else (bad, good)
    for each in (*earlier, good, good):
        its(*each())
    scale = its.get_loss_scale()
    for each in later:
        its(*each())
    assert its.get_loss_scale() == (scale if later[0] is bad else scale / 2)
    reasons = its.skip_reasons()
    assert (reasons["loss"], reasons["gradients"]) == (1, 1)
