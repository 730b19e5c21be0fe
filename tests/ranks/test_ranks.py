"""What ranks do together within a step, shown in one process by a double in the place of the other ranks."""

import dataclasses

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from support.networks import HalfPrecision, Mlp, batch, overflowing_batch
from support.token_networks import Tokens, sgd, tensors, weight_of
from support.token_networks import batch as tokens
from support.training import state

from ms_lossscale import DynamicLossScale, FloatStatusRegister, NormSpike
from ms_lossscale.step.build import build_step
from ms_lossscale.step.ranks import Alone
from ms_lossscale.step.settings import Settings, check_settings


class Doubled(nn.Cell):
    """The sum over two ranks with the same gradients."""

    def construct(self, grads):
        doubled = ()
        for grad in grads:
            doubled += (grad + grad,)
        return doubled


class TwoRanks(nn.Cell):
    """
    This rank, and one with the same gradients that overflows when it is told to. Sums, as `gradients_mean=False`.

    With `own`, each has a part of its own of every weight, whose gradient is not reduced.
    """

    exchanges = True

    def __init__(self, own=False):
        super().__init__(auto_prefix=False)
        self.has_own = own
        self.grad_reducer = nn.Identity() if own else Doubled()
        self.other_overflows = Parameter(Tensor([0], mindspore.int32), name="other_overflows", requires_grad=False)
        self.zero = Tensor([0], mindspore.int32)

    def agree(self, overflow):
        return ops.logical_or(overflow, ops.not_equal(self.other_overflows, self.zero).reshape(()))

    def agree_on_both(self, flag, other):
        return self.agree(flag), self.agree(other)

    def sum(self, number):
        return number + number

    def sum_like_gradients(self, number):
        return number + number

    def are_split(self, weights):
        return (self.has_own,) * len(weights)


def settings(**keywords):
    defaults = {"gradient_accumulation_steps": 1, "clip_norm": None, "clip_value": None, "ema_decay": None}
    defaults.update(has_aux=False, forward_state=(), after_update=None, overflow_detector=None)
    defaults.update(max_retries=0, weighted=False, skip_conditions=(), gradients_reduced=False)
    defaults["gradient_transforms"] = [()]
    return check_settings("test", 1, **{**defaults, **keywords})


def make_step(ranks, **keywords):
    network = Mlp()
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.125, momentum=0.5)
    step = build_step("test", (network,), (optimizer,), DynamicLossScale(), settings(**keywords), ranks)
    return step.set_train()


KEYWORDS = [{"gradient_accumulation_steps": 2}, *slow({}, {"clip_norm": 0.5})]


def norm_alone():
    step = make_step(Alone(), clip_norm=float("inf"))
    step(*batch(0))
    return step.update.clipping.norms()[0]


@quick_in_pynative_mode
@pytest.mark.parametrize("own, factor", [(True, 2.0**0.5), *slow((False, 2.0))], ids=["own weights", "shared weights"])
def test_the_norm_is_that_of_all_ranks_together(mode, own, factor):
    step = make_step(TwoRanks(own), clip_norm=float("inf"))
    step(*batch(0))
    np.testing.assert_allclose(step.update.clipping.norms()[0], factor * norm_alone(), rtol=1e-5)


@quick_in_pynative_mode
def test_clips_what_only_all_ranks_together_exceed(mode):
    before = state(make_step(Alone()))
    moved = []
    for clip_norm in (float("inf"), 1.5 * norm_alone()):
        step = make_step(TwoRanks(), clip_norm=clip_norm)
        step(*batch(0))
        changes = [(weight.asnumpy() - before[weight.name]).ravel() for weight in step.update.optimizers.parameters]
        moved.append(np.concatenate(changes))
    free, clipped = moved
    np.testing.assert_allclose(clipped, 0.75 * free, rtol=1e-4, atol=1e-6)


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_gradients_are_reduced_before_they_are_used(mode, keywords):
    both, alone = make_step(TwoRanks(), **keywords), make_step(Alone(), **keywords)
    calls = keywords.get("gradient_accumulation_steps", 1)
    before = state(both)
    for call in range(calls):
        both(*batch(call))
        alone(*batch(call))
    assert both.update.step_counters.steps_made() == alone.update.step_counters.steps_made() == 1
    for weight in both.update.optimizers.parameters:
        one = state(alone)[weight.name] - before[weight.name]
        # Momentum is linear in the gradients, and clipping to a norm that both exceed is not.
        expected = one if "clip_norm" in keywords else 2 * one
        np.testing.assert_allclose(weight.asnumpy() - before[weight.name], expected, rtol=1e-4, atol=1e-6)


@quick_in_pynative_mode
@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_a_mean_over_tokens_counts_those_of_all_ranks(mode, steps):
    """The sum over ranks with the same tokens is divided by twice their number."""
    networks = Tokens(), Tokens()
    for network, ranks in zip(networks, (TwoRanks(), Alone())):
        its_settings = settings(weighted=True, gradient_accumulation_steps=steps)
        step = build_step("test", (network,), (sgd(network),), DynamicLossScale(), its_settings, ranks).set_train()
        for call in range(steps):
            step(*tensors(tokens(3 + call, call)))
    np.testing.assert_allclose(weight_of(networks[0]), weight_of(networks[1]), rtol=1e-6)


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_the_overflow_of_another_rank_skips_the_step(mode, keywords):
    ranks = TwoRanks()
    step = make_step(ranks, **keywords)
    calls = keywords.get("gradient_accumulation_steps", 1)
    before = state(step)
    ops.assign(ranks.other_overflows, Tensor([1], mindspore.int32))
    for call in range(calls):
        overflow = step(*batch(call))[2]
    assert bool(overflow)
    after = state(step)
    for weight in step.update.optimizers.parameters:
        assert after[weight.name].tobytes() == before[weight.name].tobytes()
    assert step.update.step_counters.as_dict()["skipped_steps"] == 1
    assert step.scaling.loss_scales[0].get_loss_scale() == 2.0**15


def test_no_setting_can_be_forgotten_when_ranks_compare():
    described = settings().described()
    changes = {
        "gradient_accumulation_steps": 2,
        "clip_norm": 1.0,
        "clip_value": 1.0,
        "ema_decay": 0.5,
        "has_aux": True,
        "forward_state": (Parameter(Tensor(0.0), name="further"),),
        "after_update": nn.Identity(),
        "overflow_detector": FloatStatusRegister(),
        "max_retries": 1,
        "weighted": True,
        "skip_conditions": (NormSpike(1.0),),
        "gradients_reduced": True,
        "gradient_transforms": ((nn.Identity(),),),
    }
    assert set(changes) == {field.name for field in dataclasses.fields(Settings)}
    for name, value in changes.items():
        changed = dataclasses.replace(settings(), **{name: value})
        assert changed.described()[name] != described[name]


class CountedMessages(TwoRanks):
    """Of two networks with scales of their own, the other rank says that the second overflowed."""

    def __init__(self):
        super().__init__()
        self.messages = Parameter(Tensor([0], mindspore.int32), name="messages", requires_grad=False)
        self.one, self.theirs = Tensor([1], mindspore.int32), Tensor([False, True])

    def agree(self, overflow):
        if overflow.ndim == 0:
            # The reasons of a skipped step.
            return overflow
        overflow = ops.depend(overflow, ops.assign_add(self.messages, self.one))
        return ops.logical_or(overflow, self.theirs)


def two_networks_with_scales_of_their_own(ranks, clip_norm):
    networks = tuple(Mlp() for _ in range(2))
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    optimizers = tuple(nn.SGD(network.trainable_params(), 0.125) for network in networks)
    rules = [DynamicLossScale(2.0**10), DynamicLossScale(2.0**12)]
    for i, rule in enumerate(rules):
        rule.update_parameters_name(f"{i}.")
    of_one = {"clip_norm": clip_norm, "clip_value": None, "ema_decay": None, "has_aux": False, "weighted": False}
    its_settings = dataclasses.replace(settings(), **{name: (value,) * 2 for name, value in of_one.items()})
    return build_step("test", networks, optimizers, rules, its_settings, ranks).set_train(), rules


@quick_in_pynative_mode
@pytest.mark.parametrize("clip_norm", [0.5, *slow(None)])
def test_scales_of_their_own_are_agreed_on_in_one_message(mode, clip_norm):
    ranks = CountedMessages()
    step, rules = two_networks_with_scales_of_their_own(ranks, clip_norm)
    assert step(*batch(0))[2].asnumpy()
    assert [rule.get_loss_scale() for rule in rules] == [2.0**10, 2.0**11]
    assert step(*overflowing_batch(1))[2].asnumpy()
    assert [rule.get_loss_scale() for rule in rules] == [2.0**9, 2.0**10]
    assert int(ranks.messages.asnumpy()[0]) == 2


class OwnWeightsOverflowElsewhere(TwoRanks):
    """Every rank has parts of its own of all weights, and the other rank's of the second network are NaN."""

    def __init__(self):
        super().__init__(own=True)
        self.nan = Parameter(Tensor(float("nan"), mindspore.float32), name="nan", requires_grad=False)
        self.asked = Parameter(Tensor(0, mindspore.int32), name="asked", requires_grad=False)
        self.one, self.first = Tensor(1, mindspore.int32), Tensor(1, mindspore.int32)
        self.theirs = Tensor([False, True])

    def sum(self, number):
        asked = ops.assign_add(self.asked, self.one)
        return ops.select(asked > self.first, self.nan, number + number)

    def agree(self, overflow):
        return ops.logical_or(overflow, self.theirs) if overflow.ndim else overflow


@quick_in_pynative_mode
@pytest.mark.parametrize("clip_norm", [0.5, *slow(None, float("inf"))])
def test_the_norm_over_weights_of_ones_own_shows_nobody_elses(mode, clip_norm):
    step, rules = two_networks_with_scales_of_their_own(OwnWeightsOverflowElsewhere(), clip_norm)
    assert step(*batch(0))[2].asnumpy()
    assert [rule.get_loss_scale() for rule in rules] == [2.0**10, 2.0**11]


@quick_in_pynative_mode
@pytest.mark.parametrize("ranks, skips", [(TwoRanks, True), (Alone, False)], ids=["two ranks", "alone"])
def test_a_sum_that_float16_can_not_hold_has_overflowed(mode, ranks, skips):
    network = HalfPrecision()
    optimizer = nn.SGD(network.trainable_params(), 2.0**-10)
    step = build_step("test", (network,), (optimizer,), DynamicLossScale(1.0), settings(), ranks())
    before = state(network)["weight"]
    # The gradient, 2 x (x weight - y), is some 40000.
    x = np.float32([[200, 0, 0]])
    assert bool(step(Tensor(x), Tensor(x @ before - 100))[2]) == skips
    after = state(network)["weight"]
    assert np.isfinite(after).all()
    assert (after.tobytes() == before.tobytes()) == skips
