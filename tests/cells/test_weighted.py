"""Losses that are sums over different numbers of things: the step is that of one batch with all of them."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor
from support.token_networks import (
    LEARNING_RATE,
    WIDTH,
    Tokens,
    batch,
    clipped,
    gradient,
    loss_of,
    sgd,
    tensors,
    weight_of,
)
from support.training import changed, same_bits, state

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ManualStep,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)


class WithAux(Tokens):
    def construct(self, x, y, mask):
        loss, count = super().construct(x, y, mask)
        return loss, count, x, {"mask": mask}


def dynamic(scale=2.0**10):
    return DynamicLossScale(scale, scale_window=100)


def trained(network=None, loss_scale=None, **keywords):
    network = network or Tokens()
    cell = ScaledTrainOneStepCell(network, sgd(network), loss_scale or dynamic(), weighted=True, **keywords)
    return network, cell.set_train()


CYCLES = [(1, 4), (6, 2), (0, 5), (3, 3)]


@pytest.mark.parametrize("keywords", [{}, *slow({"clip_norm": 0.5}, {"max_retries": 2})], ids=str)
def test_a_cycle_is_one_big_batch(mode, keywords):
    network, cell = trained(gradient_accumulation_steps=2, **keywords)
    for i, counts in enumerate(CYCLES):
        before = weight_of(network)
        batches = [batch(count, 10 * i + j) for j, count in enumerate(counts)]
        for data in batches:
            loss, overflow, _ = cell(*tensors(data))
            np.testing.assert_allclose(float(loss), loss_of(before, data), rtol=2e-6)
        grad = gradient(before, batches)
        if "clip_norm" in keywords:
            grad = clipped(grad, 0.5)
        np.testing.assert_allclose(weight_of(network), before - LEARNING_RATE * grad, rtol=2e-6)
        assert not bool(overflow)


def test_the_mean_of_means_is_another(mode):
    """What a cell without weights does: it is off by much more than rounding."""
    batches = [batch(1, 0), batch(4, 1)]
    network, cell = trained(gradient_accumulation_steps=2)
    mean = Tokens(weight_as="mean")
    of_means = ScaledTrainOneStepCell(mean, sgd(mean), dynamic(), gradient_accumulation_steps=2).set_train()
    start = weight_of(network)
    for data in batches:
        cell(*tensors(data)), of_means(*tensors(data))
    right = gradient(start, batches)
    np.testing.assert_allclose(start - weight_of(network), LEARNING_RATE * right, rtol=1e-5)
    wrong = (start - weight_of(mean)) / LEARNING_RATE
    assert np.linalg.norm(wrong - right) > 0.2 * np.linalg.norm(right)


@pytest.mark.parametrize("calls", [1, *slow(2)])
def test_a_flushed_cycle(mode, calls):
    network, cell = trained(gradient_accumulation_steps=3)
    before = weight_of(network)
    batches = [batch(count, seed) for seed, count in enumerate((5, 2)[:calls])]
    for data in batches:
        cell(*tensors(data))
    cell.flush()
    np.testing.assert_allclose(weight_of(network), before - LEARNING_RATE * gradient(before, batches), rtol=2e-6)
    # Nothing is left for the next cycle.
    before = weight_of(network)
    batches = [batch(count, 7 + seed) for seed, count in enumerate((1, 6, 2))]
    for data in batches:
        cell(*tensors(data))
    np.testing.assert_allclose(weight_of(network), before - LEARNING_RATE * gradient(before, batches), rtol=2e-6)


def test_without_any_weight_the_step_is_a_clean_one(mode):
    network, cell = trained(gradient_accumulation_steps=2)
    before = weight_of(network)
    for seed in range(2):
        loss, overflow, _ = cell(*tensors(batch(0, seed)))
        assert float(loss) == 0.0 and not bool(overflow)
    np.testing.assert_array_equal(weight_of(network), before)
    assert cell.counters()["applied_steps"] == 1
    network, cell = trained()
    assert not bool(cell(*tensors(batch(0)))[1])
    np.testing.assert_array_equal(weight_of(network), before)


def test_an_overflow_is_one_whatever_the_weights(mode):
    network, cell = trained(gradient_accumulation_steps=2)
    before = weight_of(network)
    x, y, mask = batch(3)
    x[0, 0] = np.inf
    cell(*tensors((x, y, mask)))
    assert bool(cell(*tensors(batch(4)))[1])
    np.testing.assert_array_equal(weight_of(network), before)
    assert cell.get_loss_scale() == 2.0**9
    assert float(cell.parameters_dict()["accumulation.sum_of_weights"].asnumpy()) == 0.0


@quick_in_pynative_mode
def test_aux_and_numbers(mode):
    network, cell = trained(WithAux(), has_aux=True)
    data = batch(2)
    before = weight_of(network)
    loss, _, _, aux = cell(*tensors(data))
    np.testing.assert_allclose(float(loss), loss_of(before, data), rtol=2e-6)
    np.testing.assert_array_equal(aux[0].asnumpy(), data[0])
    np.testing.assert_array_equal(aux[1]["mask"].asnumpy(), data[2])
    network, cell = trained(Tokens(weight_as="number"))
    cell(*tensors(batch(3)))
    np.testing.assert_allclose(weight_of(network), before - LEARNING_RATE * gradient(before, [batch(3)]), rtol=2e-6)


@pytest.mark.parametrize("own", [False, *slow(True)])
@pytest.mark.parametrize("steps", [1, 2])
def test_networks_that_step_together(mode, own, steps):
    """One is weighted, and one returns the mean over its tokens, whatever their number."""
    networks = [Tokens("a"), Tokens("b", weight_as="mean")]
    cell = SimultaneousTrainOneStepCell(
        networks,
        [sgd(network) for network in networks],
        [dynamic(), dynamic(2.0**8)] if own else dynamic(),
        weighted=[True, False],
        gradient_accumulation_steps=steps,
    ).set_train()
    before = [weight_of(network) for network in networks]
    batches = [batch(count, seed) for seed, count in enumerate((1, 5)[:steps])]
    for data in batches:
        losses = cell(*tensors(data))[3].asnumpy()
        np.testing.assert_allclose(losses, [loss_of(before[0], data)] * 2, rtol=2e-6)
    of_means = np.mean([gradient(before[1], [data]) for data in batches], axis=0)
    for network, its, grad in zip(networks, before, (gradient(before[0], batches), of_means)):
        np.testing.assert_allclose(weight_of(network), its - LEARNING_RATE * grad, rtol=3e-6)


def test_networks_that_step_in_turn(mode):
    networks = [Tokens("a"), Tokens("b")]
    cell = AlternatingTrainOneStepCell(
        networks,
        [sgd(network) for network in networks],
        dynamic(),
        weighted=True,
        gradient_accumulation_steps=2,
        every=(1, 1),
    ).set_train()
    before = weight_of(networks[0])
    batches = [batch(1, 0), batch(5, 1)]
    for data in batches:
        cell(*tensors(data))
    for network in networks:
        np.testing.assert_allclose(weight_of(network), before - LEARNING_RATE * gradient(before, batches), rtol=2e-6)


def manual(how, network, **keywords):
    step = ManualStep(network, sgd(network), dynamic(), **keywords).set_train()

    def forward(x, y, mask):
        loss, count = network(x, y, mask)
        return step.scale(loss), loss, count

    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)

    def train_step(x, y, mask):
        x, y, mask = step.begin(x, y, mask)
        (_, loss, count), grads = value_and_grad(x, y, mask)
        return loss, step.end(grads, loss=loss, weight=count)

    return step, mindspore.jit(train_step) if how == "in_jit" else train_step


@pytest.mark.parametrize("how", ["eagerly", "in_jit"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_manual_step_gives_the_same_bits(mode, how, steps):
    keywords = {"gradient_accumulation_steps": steps, "clip_norm": 0.7, "ema_decay": 0.5}
    _, cell = trained(**keywords)
    step, train_step = manual(how, Tokens(), **keywords)
    for seed, count in enumerate((1, 4, 0, 6, 2)):
        cell(*tensors(batch(count, seed)))
        train_step(*tensors(batch(count, seed)))
    cell.flush(), step.flush()
    assert not changed(state(cell), state(step))


@quick_in_pynative_mode
def test_all_calls_of_a_manual_step_have_a_weight_or_none(mode):
    network = Tokens()
    step, _ = manual("eagerly", network, gradient_accumulation_steps=2)
    grads = (Tensor(np.ones(WIDTH, np.float32)),)
    step.begin(*tensors(batch(1)))
    step.end(grads, weight=2)
    before = state(step)
    step.begin(*tensors(batch(1)))
    with pytest.raises(ValueError, match=r"all calls must have a 'weight', or none, but this one has no weight"):
        step.end(grads)
    assert not changed(before, state(step))
    # One that goes on within the cycle knows from the checkpoint.
    other, _ = manual("eagerly", Tokens(), gradient_accumulation_steps=2)
    other.load_state_dict({name: Tensor(value) for name, value in before.items()})
    other.begin(*tensors(batch(1)))
    with pytest.raises(ValueError, match="this one has no weight"):
        other.end(grads)
    with pytest.raises(TypeError, match=r"a weight must be a number or a Tensor of shape \(\), but it is"):
        other.end(grads, weight="2")
    start = weight_of(network)
    assert not bool(other.end(grads, weight=Tensor(2.0)))
    # Twice ones, scaled by 2**10, over four things.
    np.testing.assert_allclose(other.networks[0].weight.asnumpy(), start - LEARNING_RATE * 0.5 * 2.0**-10, rtol=1e-6)


@quick_in_pynative_mode
def test_it_resumes_within_a_cycle_and_only_with_weights(mode):
    (_, first), (_, second) = (trained(gradient_accumulation_steps=3) for _ in "ab")
    for seed, count in enumerate((1, 5, 2, 3, 6)):
        first(*tensors(batch(count, seed)))
    saved = {name: Tensor(value) for name, value in state(first).items()}
    second.load_state_dict(saved)
    for cell in (first, second):
        outputs = cell(*tensors(batch(4, 9)))
    assert not changed(state(first), state(second)) and same_bits(outputs[0].asnumpy(), outputs[0].asnumpy())
    network = Tokens(weight_as="mean")
    unweighted = ScaledTrainOneStepCell(network, sgd(network), dynamic(), gradient_accumulation_steps=3).set_train()
    before = state(unweighted)
    with pytest.raises(ValueError, match=r"'weighted' must be True, but got False.*Nothing was loaded"):
        unweighted.load_state_dict(saved)
    assert not changed(before, state(unweighted))
