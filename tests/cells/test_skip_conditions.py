"""Conditions that skip a step which did not overflow: their law, what they leave, and when they are asked."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from support.retried_networks import Slope, inputs
from support.sloped_networks import LEARNING_RATE, cell, manual, with_norm
from support.training import bookkeeping, changed, of_both, same_bits, state

from ms_lossscale import (
    DynamicLossScale,
    NormSpike,
    ScaledTrainOneStepCell,
    SkipCondition,
)


class Law:
    """The rule of NormSpike in NumPy, in float32 as it is written in its docstring."""

    def __init__(self, max_norm=None, z_score=None, window=100):
        self.max_norm, self.z_score, self.window = max_norm, z_score, window
        self.mean = self.variance = np.float32(0)
        self.steps = 0

    def skips(self, norm):
        if self.max_norm is not None and not norm <= np.float32(self.max_norm):
            return True
        if self.z_score is None or self.steps < self.window:
            return False
        return not norm <= self.mean + np.float32(self.z_score) * np.sqrt(self.variance)

    def observe(self, norm):
        a = np.float32(1 / self.window)
        if self.steps == 0:
            self.mean, self.variance = norm, np.float32(0)
        else:
            d = norm - self.mean
            self.mean += a * d
            self.variance = np.float32(1 - 1 / self.window) * (self.variance + a * d * d)
        self.steps += 1


class HighLoss(SkipCondition):
    """Asks to skip where the loss is high. It counts how often it was asked, and what it observed."""

    def __init__(self, highest=1e3):
        super().__init__()
        self.highest, self.one = Tensor(highest), Tensor(1.0)
        self.observed = Parameter(Tensor(0.0), name="observed", requires_grad=False)
        self.last_loss = Parameter(Tensor(0.0), name="last_loss", requires_grad=False)

    def observe(self, loss, norm):
        ops.assign_add(self.observed, self.one)
        ops.assign(self.last_loss, loss)

    def construct(self, loss, norm):
        return loss > self.highest


def dynamic(scale=2.0**10, **keywords):
    return DynamicLossScale(scale, scale_window=3, **keywords)


RNG = np.random.default_rng(0)
# Mostly near 4, with spikes, some of them before the window has filled.
NORMS = [float(n) for n in np.where(RNG.random(40) < 0.2, 64.0, 4.0 + RNG.normal(size=40)).astype(np.float32)]
RULES = {
    "max_norm": {"max_norm": 10.0},
    "z_score": {"z_score": 3.0, "window": 5},
    "both": {"max_norm": 40.0, "z_score": 2.0, "window": 4},
}


@quick_in_graph_mode
@pytest.mark.parametrize("rule", ["both", *slow("max_norm", "z_score")])
def test_the_law_against_numpy(mode, rule):
    condition, law = NormSpike(**RULES[rule]), Law(**RULES[rule])
    trained = cell(dynamic(), skip_conditions=[condition])
    decisions, skipped = [], []
    for norm in NORMS:
        x = with_norm(norm)
        wanted = law.skips(np.float32(norm))
        if not wanted:
            law.observe(np.sqrt(np.sum(np.square(x.asnumpy()))))
        skipped.append(wanted)
        decisions.append(bool(trained(x)[1]))
    assert decisions == skipped
    assert 2 <= sum(skipped) <= 20
    if condition.z_score is not None:
        np.testing.assert_allclose(condition.mean.asnumpy(), law.mean, rtol=1e-6)
        np.testing.assert_allclose(condition.variance.asnumpy(), law.variance, rtol=1e-5)
        assert int(condition.steps.asnumpy()) == law.steps == trained.counters()["applied_steps"]


@quick_in_pynative_mode
def test_at_max_norm_a_step_is_applied(mode):
    trained = cell(1.0, skip_conditions=[NormSpike(max_norm=4.0)])
    assert [bool(trained(with_norm(norm))[1]) for norm in (4.0, 4.000001)] == [False, True]


@quick_in_pynative_mode
def test_an_overflow_is_an_overflow_whatever_a_condition_says(mode):
    trained = cell(dynamic(), skip_conditions=[HighLoss(-np.inf)])
    assert bool(trained(with_norm(np.inf))[1])
    assert trained.get_loss_scale() == 2.0**9
    assert trained.counters()["skipped_by_condition"] == 0
    assert trained.skip_reasons()["loss"] == 1


class Counting(HighLoss):
    """Counts in its Parameter how often it is asked. What a skipped step leaves of that is nothing."""

    def __init__(self, highest):
        super().__init__(highest)
        self.asked = Parameter(Tensor(0.0), name="asked", requires_grad=False)

    def construct(self, loss, norm):
        ops.assign_add(self.asked, self.one)
        return loss > self.highest


@quick_in_graph_mode
def test_state_of_a_condition(mode):
    condition = Counting(100.0)
    trained = cell(dynamic(), skip_conditions=[condition])
    losses = [float(trained(with_norm(norm))[0]) for norm in (4.0, 64.0, np.inf, 5.0)]
    assert losses[1] > 100 > losses[3]
    # Asked three times, observed twice, and one of the three was undone.
    assert [float(its.asnumpy()) for its in (condition.asked, condition.observed, condition.last_loss)] == [
        2.0,
        2.0,
        losses[3],
    ]
    assert {"asked", "observed", "last_loss"} <= trained.parameters_dict().keys()


@quick_in_pynative_mode
def test_retries_that_succeed_keep_their_back_offs(mode):
    network = Slope()
    trained = ScaledTrainOneStepCell(
        network,
        nn.SGD([network.weight], LEARNING_RATE),
        DynamicLossScale(2.0**15, scale_window=2),
        max_retries=8,
        skip_conditions=[NormSpike(max_norm=50.0)],
    ).set_train()
    before = network.weight.asnumpy().copy()
    _, overflow, used = trained(*inputs(63.0))
    assert bool(overflow) and float(used) == trained.get_loss_scale() < 2.0**15
    counters = trained.counters()
    assert (counters["retries"], counters["skipped_by_condition"], counters["applied_steps"]) == (5, 1, 0)
    np.testing.assert_array_equal(network.weight.asnumpy(), before)
    assert int(trained.loss_scale.clean_steps.asnumpy()) == 0
    assert not bool(trained(*inputs(1.0))[1])
    assert trained.get_loss_scale() == float(used)


@quick_in_pynative_mode
@pytest.mark.parametrize(("how", "steps"), slow(("eagerly", 1), ("in_jit", 2)))
def test_a_manual_step_skips_as_a_cell_does(mode, how, steps):
    def conditions():
        return [NormSpike(max_norm=40.0, z_score=3.0, window=5), HighLoss(30.0)]

    keywords = {"gradient_accumulation_steps": steps, "clip_norm": 5.0}
    trained = cell(dynamic(), skip_conditions=conditions(), **keywords)
    step, train_step = manual(dynamic(), how, skip_conditions=conditions(), **keywords)
    for norm in (*NORMS[:12], np.inf, *NORMS[12:20]):
        loss, overflow, _ = trained(with_norm(norm))
        its_loss, its_overflow = train_step(with_norm(norm))
        assert bool(its_overflow) == bool(overflow) and same_bits(its_loss.asnumpy(), loss.asnumpy())
    assert not changed(*of_both(trained, step))
    assert step.counters() == trained.counters() and step.skip_reasons() == trained.skip_reasons()
    assert trained.counters()["skipped_by_condition"] >= 2


def test_what_cannot_be_assigned_or_loaded():
    condition = NormSpike(max_norm=1.0, z_score=1.0)
    with pytest.raises(AttributeError, match="max_norm"):
        condition.max_norm = 2.0
    trained = cell(dynamic(), skip_conditions=[condition])
    with pytest.raises(AttributeError, match="skip_conditions"):
        trained.skip_conditions = []
    for name, value in (("mean", np.float32(np.nan)), ("variance", np.float32(-1)), ("steps", np.int32(-1))):
        values = {**state(trained), f"norm_spike.{name}": value}
        with pytest.raises(ValueError, match=rf"norm_spike.{name}"):
            trained.load_state_dict({name: Tensor(value) for name, value in values.items()})


@quick_in_pynative_mode
def test_a_norm_that_is_nan_is_a_spike_where_nothing_is_checked(mode):
    trained = cell(None, skip_conditions=[NormSpike(max_norm=10.0)])
    before = state(trained)
    assert bool(trained(with_norm(np.nan))[1])
    assert changed(before, state(trained)) <= bookkeeping(before)
