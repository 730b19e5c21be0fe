"""A training that goes wrong in silence says so, once, without a monitor: skips, NaN weights, unreached weights."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from support.gan_networks import renamed
from support.linear_pair import Trained
from support.networks import Linear, batch, batch_for
from support.python_process import skip_with_older_mindspore
from support.sloped_networks import cell, manual, with_norm
from support.training import by_sgd, stepping

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ManualStep,
    NormSpike,
    ScaledTrainOneStepCell,
    ShardedOptimizer,
    SimultaneousTrainOneStepCell,
)

SEE = " More symptoms and causes: docs/diagnosis.md."


def linear(loss_scale, network=None):
    return by_sgd(network or Linear(), loss_scale)


def warning_of(call, inputs, calls=50):
    """The one warning of so many calls, which has to come at the last one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(calls - 1):
            call(*inputs)
    with pytest.warns(RuntimeWarning) as caught:
        call(*inputs)
    (warning,) = caught
    return str(warning.message)


NAN = (
    "Weights themselves are infinite or NaN: weight ({}). No loss scale and no cell in float32 mends that. Go on from "
    "a checkpoint in which they are finite, and look for what wrote them: a checkpoint that was loaded, or the "
    "optimizer (an eps of 1e-8 is 0 in float16)." + SEE
)


def test_weights_that_are_nan(mode):
    its = linear(DynamicLossScale(2.0**10))
    its.load_state_dict({"weight": Tensor(np.full((3, 1), np.nan, np.float32))}, strict=False)
    message = warning_of(its, batch(0))
    assert message == f"For 'ScaledTrainOneStepCell', after step 50: {NAN.format('3 values')}"


@quick_in_graph_mode
def test_each_is_told_once_at_the_line_of_the_program(mode):
    its = linear(DynamicLossScale(2.0**10))
    with pytest.warns(RuntimeWarning, match="the last 50 steps were skipped") as caught:
        for _ in range(500):
            its(*batch_for(True))
    (warning,) = caught
    assert warning.filename == __file__
    its.load_state_dict({"weight": Tensor(np.full((3, 1), np.nan, np.float32))}, strict=False)
    assert "after step 1000: Weights themselves are infinite or NaN" in warning_of(its, batch(0), calls=500)


class Dead(nn.Cell):
    """A linear model in float16 behind a ReLU. The second weight has a gradient of exactly 0."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.float16([1.0, -1.0])), name="weight")
        self.bias = Parameter(Tensor(np.float16([0.5])), name="bias")

    def construct(self, x, y):
        outputs = ops.relu(x * self.weight).sum(1) + self.bias
        return ops.square((outputs - y).astype(mindspore.float32)).mean()


@quick_in_graph_mode
def test_weights_that_become_nan_while_steps_are_applied(mode):
    skip_with_older_mindspore("MindSpore 2.7's experimental AdamW refuses float16 weights")
    network = Dead()
    optimizer = mindspore.experimental.optim.AdamW(network.trainable_params(), 0.01)
    its = ScaledTrainOneStepCell(network, optimizer, 8.0).set_train()
    message = warning_of(its, (Tensor(np.ones((4, 2), np.float16)), Tensor(np.full(4, 3.0, np.float16))))
    assert message.endswith(f"after step 50: {NAN.format('1 value')}")
    assert its.counters()["skipped_steps"] == 0


@quick_in_graph_mode
def test_a_training_that_skips_with_its_scale_at_the_floor(mode):
    its = linear(DynamicLossScale(2.0**10))
    assert warning_of(its, batch_for(True)) == (
        "For 'ScaledTrainOneStepCell', the last 50 steps were skipped, now at a loss scale of 1, so that no weight "
        "changes any more. By skip_reasons() it is mostly 'loss'; the gradients that were not finite last: weight. "
        "What to try: no loss scale fixes a loss that is not finite: locate_overflow names the cell where it "
        f"begins.{SEE}"
    )


@quick_in_pynative_mode
def test_a_manual_step_and_a_condition(mode):
    _, call = manual(DynamicLossScale(1.0), skip_conditions=[NormSpike(max_norm=10.0)])
    message = warning_of(call, (with_norm(64.0),))
    assert message.startswith("For 'ManualStep', the last 50 steps were skipped, now at a loss scale of 1, so that no ")
    assert "'condition'; the gradients that were not finite last: none. What to try: nothing overflows, so" in message


@quick_in_graph_mode
def test_one_of_several_networks(mode):
    trained = Trained("alternating", scale=2.0**3)
    with pytest.warns(RuntimeWarning, match=r"the last 50 steps of network 1 were skipped, .* last: second\.weight\."):
        for _ in range(50):
            trained.call_cell(0, (False, True))


@quick_in_graph_mode
def test_a_training_that_recovers_says_nothing(mode):
    its = cell(DynamicLossScale(2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # At the floor, but few in a row when it looks.
        for i in range(60):
            its(with_norm(1.0 if i in (20, 42) else np.inf))


class Stopped(Linear):
    def construct(self, x, y):
        return ops.stop_gradient(super().construct(x, y))


@quick_in_graph_mode
def test_an_optimizer_to_whose_weights_no_gradient_flows(mode):
    its = linear(DynamicLossScale(2.0**10), Stopped())
    assert warning_of(its, batch(0)) == (
        "For 'ScaledTrainOneStepCell', no weight has changed since the first call: unless the learning rate is 0 so "
        "far, no gradient reaches any. Look for ops.stop_gradient between the loss and these weights; or float16 "
        f"flushes all gradients to zero, which a larger loss scale prevents.{SEE}"
    )


@quick_in_pynative_mode
def test_a_manual_step_is_told_of_what_it_has_and_that_the_data_may_be_the_reason(mode):
    network = Linear()
    step = by_sgd(network, DynamicLossScale(2.0**4), kind="manual")
    message = warning_of(stepping(step, network), batch_for(True))
    assert "By skip_reasons() it is mostly 'gradients'" in message
    assert "or there is NaN in the data, which end(grads, loss=loss) would tell: locate_overflow(forward, " in message
    assert "find_loss_scale" not in message


class PartlyFloat16(nn.Cell):
    """The gradient of each weight is the slope: of the first ones, which are float16, below what float16 holds."""

    def __init__(self, *dtypes):
        super().__init__()
        values = [Tensor(np.ones(3, np.float32), dtype) for dtype in dtypes]
        self.all = ParameterTuple(Parameter(value, name=f"weight_{i}") for i, value in enumerate(values))

    def construct(self, slope):
        loss = 0.0
        for weight in self.all:
            loss = loss + (weight.astype(mindspore.float32) * slope).sum()
        return loss


@pytest.mark.parametrize("others", [(), (mindspore.float32,)], ids=["all", "one_among_others"])
def test_float16_weights_that_lose_their_gradients(mode, others):
    network = PartlyFloat16(mindspore.float16, *others)
    its = by_sgd(network, DynamicLossScale(2.0**30, max_loss_scale=2.0**60), rate=2.0**22)
    message = warning_of(its, (Tensor(np.full(3, 2.0**-26, np.float32)),))
    assert "some weights have not changed since the first call" in message
    assert "These weights are float16: weight_0. An optimizer gets their gradients in float16, after unsc" in message
    assert "set_dtype(mindspore.float32) before the optimizer is constructed" in message
    assert "ShardedOptimizer" in message
    assert "larger loss scale" not in message


@quick_in_graph_mode
def test_masters_do_not_lose_them(mode):
    network = PartlyFloat16(mindspore.float16)
    optimizer = ShardedOptimizer(network.trainable_params(), lambda weights: nn.SGD(weights, 2.0**22))
    its = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**30, max_loss_scale=2.0**60)).set_train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            its(Tensor(np.full(3, 2.0**-26, np.float32)))


@quick_in_graph_mode
@pytest.mark.parametrize("cell_class", [SimultaneousTrainOneStepCell, *slow(AlternatingTrainOneStepCell)])
@pytest.mark.parametrize("swapped", [True, False])
def test_two_optimizers_in_the_wrong_order(mode, cell_class, swapped):
    generator, discriminator = (renamed(name, nn.Dense(2, 2, has_bias=False)) for name in ("g.", "d."))

    def generator_loss(x):
        return ops.square(discriminator(generator(x)) - 1.0).mean()

    def discriminator_loss(x):
        fake = discriminator(ops.stop_gradient(generator(x)))
        return (ops.square(discriminator(x) - 1.0) + ops.square(fake)).mean()

    optimizers = [nn.SGD(network.trainable_params(), 0.01) for network in (discriminator, generator)]
    losses, order = [discriminator_loss, generator_loss], slice(None, None, -1 if swapped else 1)
    its = cell_class(losses, optimizers[order], DynamicLossScale(2.0**10)).set_train()
    says = "no weight of optimizer 0 has changed since the first call: .* Loss i trains the weights of optimizer i: are"
    with pytest.warns(RuntimeWarning, match=says) if swapped else warnings.catch_warnings():
        warnings.simplefilter("always" if swapped else "error")
        for _ in range(50):
            its(Tensor(np.float32([[1, 2], [3, 4]])))


def with_optimizer_kept(place):
    """Returns a train step whose own optimizer is called, too, before its `end` or after it."""
    network = Linear()
    optimizer = nn.SGD([network.weight], 0.01)
    step = ManualStep(network, optimizer, DynamicLossScale(2.0**4)).set_train()
    value_and_grad = step.value_and_grad(network)

    def train_step(x, y):
        loss, grads = value_and_grad(*step.begin(x, y))
        if place == "before":
            optimizer(grads)
        overflow = step.end(grads)
        if place == "after":
            optimizer(grads)
        return loss, overflow

    return train_step


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_optimizer_that_is_called_beside_end(mode, place):
    train_step = with_optimizer_kept(place)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(5):
            train_step(*batch(0))
    (warning,) = caught
    assert str(warning.message) == (
        "For 'ManualStep', the 'global_step' of an optimizer moves twice for each applied step: 'end' calls the "
        "optimizer, and other code does, too. Remove optimizer(grads) from the loop."
    )


@quick_in_pynative_mode
def test_two_steps_with_one_optimizer(mode):
    network = Linear()
    optimizer = nn.SGD([network.weight], 0.01)
    steps = [ManualStep(network, optimizer, DynamicLossScale(2.0**4), name=name).set_train() for name in "ab"]
    derivatives = [step.value_and_grad(network) for step in steps]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            for step, value_and_grad in zip(steps, derivatives):
                assert not step.end(value_and_grad(*step.begin(*batch(0)))[1])
