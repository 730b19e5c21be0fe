"""A training that only skips says so, once, without a monitor."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import MODES, quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn, ops
from support.in_mode import in_mode
from support.linear_pair import Trained
from support.networks import BehindStopGradient, Linear, batch, batch_for, overflowing
from support.npu_networks import Saturating, saturating_batch
from support.python_process import skip_with_older_mindspore
from support.retried_networks import SteepBackward, inputs
from support.sloped_networks import cell, with_norm

from ms_lossscale import (
    DynamicLossScale,
    ManualStep,
    NormSpike,
    ScaledTrainOneStepCell,
    advise_float32,
    emulation,
    locate_overflow,
    profile_gradients,
)
from ms_lossscale.cells import endless_skips


@pytest.fixture
def few(monkeypatch):
    """It looks at every 8th call, 5 skips are endless, and 2 more are looked at."""
    monkeypatch.setattr(endless_skips, "_CALLS", 8)
    monkeypatch.setattr(endless_skips, "_SKIPS", 5)
    monkeypatch.setattr(endless_skips, "_LOOKS", 2)


def linear():
    network = Linear()
    optimizer = nn.SGD([network.weight], 0.01)
    return network, ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10)).set_train()


def warning_of(cell, inputs, calls):
    """The one warning of so many calls, which has to come at the last one and not again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(calls - 1):
            cell(*inputs)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(calls):
            cell(*inputs)
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


def set_to_nan(weight):
    ops.assign(weight, Tensor(np.full(weight.shape, np.nan, np.float32)))


@quick_in_graph_mode
def test_weights_that_are_nan(mode, few):
    network, cell = linear()
    set_to_nan(network.weight)
    assert warning_of(cell, batch(0), calls=10) == (
        "For 'ScaledTrainOneStepCell', the last 10 steps, all since step 1, were skipped, now at a loss scale of 1, so "
        "that no weight changes any more: in the last 2 skips the gradients of weight (2) were not finite; the loss "
        "was not finite in 2 of them. Weights themselves are infinite or NaN: weight (3 values). No loss "
        "scale and no cell in float32 mends that. Go on from a checkpoint in which they are finite, and look for what "
        "wrote them: a checkpoint that was loaded, or the optimizer (an eps of 1e-8 is 0 in float16). Other symptoms "
        "and their causes: docs/symptoms.md."
    )


class Dead(nn.Cell):
    """A linear model in float16 behind a ReLU. The second weight has a gradient of exactly 0. One layer is frozen."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.float16([1.0, -1.0])), name="weight")
        self.bias = Parameter(Tensor(np.float16([0.5])), name="bias")
        self.frozen = nn.Dense(2, 1, weight_init=Tensor(np.float32([[-np.inf, 1.0]])), has_bias=False)
        self.frozen.weight.requires_grad = False

    def construct(self, x, y):
        outputs = ops.relu(x * self.weight).sum(1) + self.bias
        return ops.square((outputs - y).astype(mindspore.float32)).mean()


def dead(eps=1e-8, **keywords):
    skip_with_older_mindspore("MindSpore 2.7's experimental AdamW refuses float16 weights")
    network = Dead()
    optimizer = mindspore.experimental.optim.AdamW(network.trainable_params(), 0.01, eps=eps)
    return network, ScaledTrainOneStepCell(network, optimizer, **keywords).set_train()


DEAD_BATCH = Tensor(np.ones((4, 2), np.float16)), Tensor(np.full(4, 3.0, np.float16))


def test_weights_that_become_nan_while_steps_are_applied(mode, few):
    network, cell = dead(loss_scale=DynamicLossScale(8.0))
    message = warning_of(cell, DEAD_BATCH, calls=8)
    assert np.isnan(network.weight.asnumpy()).tolist() == [False, True]
    assert cell.counters()["skipped_steps"] == 0
    assert message.startswith(
        "For 'ScaledTrainOneStepCell', weights are infinite or NaN, after step 8 at the latest: weight (1 value). "
        "Steps are applied all the same, since the loss and the gradients are finite. Go on from a checkpoint in which "
    )
    assert all(word in message for word in ("checkpoint that was loaded", "eps", "float32", "ShardedOptimizer"))


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["loaded", "frozen", "unchecked"])
def test_a_weight_that_is_loaded_as_nan(mode, few, kind):
    _, cell = dead(eps=1e-4, loss_scale=None if kind == "unchecked" else 8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            cell(*DEAD_BATCH)
    name, value = "weight", np.float16([1.0, np.nan])
    if kind == "frozen":
        name, value = "frozen.weight", np.float32([[-np.inf, np.nan]])
    cell.load_state_dict({name: Tensor(value)}, strict=False)
    message = warning_of(cell, DEAD_BATCH, calls=8)
    assert f"after step 16 at the latest; after step 8 they were finite: {name} (1 value). " in message
    cause = "nothing is checked: no loss scale was passed" if kind == "unchecked" else "the loss and the gradients are"
    assert f"Steps are applied all the same, since {cause}" in message


@quick_in_graph_mode
def test_a_training_that_went_well_before(mode, few):
    _, cell = linear()
    good, bad = batch(0), batch_for(True)
    for _ in range(3):
        cell(*good)
    message = warning_of(cell, bad, calls=7)
    assert "look for NaN in the data (the weights are finite); ms_lossscale.locate_overflow(cell, " in message
    assert "the last 7 steps, all since step 4, were skipped" in message
    assert "If it trained before, lower the learning rate or pass clip_norm. Other symptoms" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_scale, calls, written",
    [(DynamicLossScale(2.0**10), 55, "1"), (2.0**24, 505, "2**24")],
    ids=["floor", "fixed"],
)
def test_the_calls_between_two_looks(loss_scale, calls, written):
    with in_mode(MODES["graph"]):
        network = Linear()
        cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.01), loss_scale).set_train()
        set_to_nan(network.weight)
        assert f"{calls} steps, all since step 1, were skipped, now at a loss scale of {written}," in warning_of(
            cell, batch(0), calls
        )


@quick_in_graph_mode
def test_a_backward_that_overflows_at_a_fixed_scale(mode, few):
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.01), 2.0**126).set_train()
    x, y = batch(0)
    message = warning_of(cell, (x, 1000 * y), calls=10)
    assert "of weight (2) were not finite; the loss was finite. What to try: this loss scale does not fall" in message


@quick_in_graph_mode
def test_a_floor_that_may_be_too_high(mode, few):
    network = SteepBackward()
    cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.01), DynamicLossScale(1.0)).set_train()
    message = warning_of(cell, inputs(2.0**4), calls=10)
    assert (
        "What to try: the backward overflows at every scale down to this one, the floor. A smaller one may do, since "
        "the loss is finite: let it fall further, min_loss_scale=2**-12, say (cell.find_loss_scale(*inputs) tells for "
        "a batch). To keep the floor: ms_lossscale.locate_overflow(cell, inputs, loss_scale=1) names where it begins"
    ) in message


@quick_in_graph_mode
def test_what_the_forward_writes(mode, few):
    network = BehindStopGradient()
    optimizer = nn.SGD(network.score.trainable_params(), 0.01)
    cell = ScaledTrainOneStepCell(network, optimizer, 128.0).set_train()
    inputs = overflowing()
    message = warning_of(cell, inputs, calls=10)
    assert (
        "in the last 2 skips all gradients were finite; the loss was finite. What to try: what the forward writes "
        "(generator.1.moving_mean, generator.1.moving_variance) became not finite, or the overflow detector reports"
    ) in message
    assert "locate_overflow" not in message


@quick_in_graph_mode
def test_the_status_register(mode, few):
    with emulation.saturation_mode():
        network = Saturating("only")
        cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), 128.0).set_train()
        inputs = saturating_batch(True, 0)
        message = warning_of(cell, inputs, calls=10)
        assert "all gradients were finite; the loss was finite. What to try: the overflow detector reports" in message
        assert "by the status register, which no gradient shows: ms_lossscale.locate_overflow(cell, inputs, " in message


@quick_in_graph_mode
def test_a_training_that_recovers_says_nothing(mode, few):
    _, cell = linear()
    good, bad = batch(0), batch_for(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Once between two looks, and twice while it is looked at.
        for i in range(25):
            cell(*(good if i in (4, 16, 24) else bad))


def spiky(loss_scale):
    return cell(loss_scale, skip_conditions=[NormSpike(max_norm=10.0)])


@quick_in_pynative_mode
@pytest.mark.parametrize("min_loss_scale", [1.0, 2.0**10], ids=["above the floor", "at the floor"])
def test_a_condition_that_skips_each_step(mode, few, min_loss_scale):
    its = spiky(DynamicLossScale(2.0**10, min_loss_scale=min_loss_scale))
    its(with_norm(1.0))
    message = warning_of(its, (with_norm(64.0),), calls=9)
    assert message.startswith(
        "For 'ScaledTrainOneStepCell', the last 9 steps, all since step 2, were skipped, now at a loss scale of 1024, "
        "so that no weight changes any more: in the last 2 skips all gradients were finite; the loss was finite; a "
        "condition asked for all of them: NormSpike(max_norm=10.0). What to try: nothing overflows, so leave the loss "
        "scale as it is, and look at the condition and its threshold. "
    )
    assert 'With clip_norm=float("inf"), grad_norm() tells the norm of each step: a larger max_norm' in message
    assert not any(word in message for word in ("min_loss_scale", "locate_overflow", "advise_float32"))


@quick_in_pynative_mode
def test_few_skips_by_a_condition_at_the_floor_say_nothing(mode, few):
    its = spiky(DynamicLossScale(2.0**10, min_loss_scale=2.0**10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Three in a row around the look at the 8th call: an overflow would be told of there.
        for i in range(24):
            its(with_norm(64.0 if i in (6, 7, 8, 9) else 1.0))
    assert its.counters()["skipped_by_condition"] == 4


@quick_in_pynative_mode
def test_some_skips_are_by_a_condition(mode, few):
    its = spiky(DynamicLossScale(2.0**10))
    with pytest.warns(RuntimeWarning) as caught:
        for i in range(10):
            its(with_norm(np.inf if i == 9 else 64.0))
    assert (
        "in the last 2 skips the gradients of slopes.weight (1) were not finite; the loss was not finite in 1 of them; "
        "a condition asked for 1 of them: NormSpike(max_norm=10.0). What to try: no loss scale fixes a loss"
    ) in str(caught[0].message)


@quick_in_graph_mode
def test_one_of_several_networks(mode, few):
    trained = Trained("alternating")
    set_to_nan(trained.weights[1])
    with pytest.warns(RuntimeWarning, match="10 steps of network 1, all since .* of second.weight .2. were not finite"):
        for _ in range(10):
            trained.call_cell(0)


class Manual:
    """A ManualStep, called like a training cell. With `passes_loss` its end gets the loss."""

    def __init__(self, network, loss_scale, passes_loss):
        self.passes_loss = passes_loss
        self.step = ManualStep(network, nn.SGD([network.weight], 0.01), loss_scale)

        def forward(*inputs):
            loss = network(*inputs)
            return self.step.scale(loss), loss

        self.forward = forward
        self.value_and_grad = mindspore.value_and_grad(forward, None, self.step.parameters, has_aux=True)

    def __call__(self, *inputs):
        (_, loss), grads = self.value_and_grad(*self.step.begin(*inputs))
        return self.step.end(grads, **({"loss": loss} if self.passes_loss else {}))


@quick_in_pynative_mode
@pytest.mark.parametrize("passes_loss", [False, True])
def test_a_manual_step_says_of_the_loss_what_it_knows(mode, few, passes_loss):
    manual = Manual(SteepBackward(), DynamicLossScale(1.0), passes_loss)
    message = warning_of(manual, inputs(2.0**4), calls=10)
    assert message.startswith("For 'ManualStep', the last 10 steps, all since step 1, were skipped, now at a loss ")
    knows = "; the loss was finite" if passes_loss else ""
    what, reason = ("the backward", "since") if passes_loss else ("the forward or the backward", "if")
    lines = message.partition(": in the last 2 skips ")[2]
    assert lines == (
        f"the gradients of slope.weight (2) were not finite{knows}. What to try: {what} overflows at every scale down "
        f"to this one, the floor. A smaller one may do, {reason} the loss is finite: let it fall further, "
        f"min_loss_scale=2**-12, say (ms_lossscale.profile_gradients(forward, step.parameters, [inputs])"
        f".recommended_loss_scale tells for a batch). To keep the floor: ms_lossscale.locate_overflow(forward, inputs, "
        f"loss_scale=1) names where it begins, ms_lossscale.advise_float32(forward, step.parameters, [inputs]) which "
        f"cells need float32 (forward is the function that you differentiate, step the ManualStep). Other symptoms and "
        f"their causes: docs/symptoms.md."
    )
    # What it says to do works.
    forward, step, batch = manual.forward, manual.step, inputs(2.0**4)
    assert locate_overflow(forward, batch, loss_scale=1).direction == "backward"
    assert profile_gradients(forward, step.parameters, [batch]).parameters
    assert advise_float32(forward, step.parameters, [batch]).loss_scale is None
    assert step.counters()["skipped_steps"] == 10 + 9


@quick_in_pynative_mode
def test_a_manual_step_whose_loss_is_not_finite(mode, few):
    message = warning_of(Manual(Linear(), 128.0, passes_loss=True), batch_for(True), calls=10)
    assert "were not finite; the loss was not finite in 2 of them. What to try: no loss scale fixes a loss" in message
    message = warning_of(Manual(Linear(), 128.0, passes_loss=False), batch_for(True), calls=10)
    assert "of weight (2) were not finite. What to try: this loss scale does not fall, so use a Dynamic" in message
