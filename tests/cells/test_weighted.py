"""Losses that are sums over different numbers of things: the step is that of one batch with all of them."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor
from support.token_networks import (
    LEARNING_RATE,
    Tokens,
    batch,
    clipped,
    gradient,
    loss_of,
    sgd,
    tensors,
    weight_of,
)
from support.training import changed, of_both, same_bits, state

from ms_lossscale import (
    DynamicLossScale,
    ManualStep,
    ScaledTrainOneStepCell,
)


class WithAux(Tokens):
    def construct(self, x, y, mask):
        loss, count = super().construct(x, y, mask)
        return loss, count, x, mask


def dynamic(scale=2.0**10):
    return DynamicLossScale(scale, scale_window=100)


def trained(network=None, loss_scale=None, **keywords):
    network = network or Tokens()
    cell = ScaledTrainOneStepCell(network, sgd(network), loss_scale or dynamic(), weighted=True, **keywords)
    return network, cell.set_train()


CYCLES = [(1, 4), (6, 2), (0, 5), (3, 3)]


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", [{"clip_norm": 0.5}, *slow({"max_retries": 2})], ids=str)
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


@quick_in_graph_mode
def test_without_any_weight_the_step_is_a_clean_one(mode):
    network, cell = trained(gradient_accumulation_steps=2)
    before = weight_of(network)
    for seed in range(2):
        loss, overflow, _ = cell(*tensors(batch(0, seed)))
        assert float(loss) == 0.0 and not bool(overflow)
    np.testing.assert_array_equal(weight_of(network), before)
    assert cell.counters()["applied_steps"] == 1


@quick_in_pynative_mode
def test_aux_and_numbers(mode):
    network, cell = trained(WithAux(), has_aux=True)
    data = batch(2)
    before = weight_of(network)
    loss, _, _, aux = cell(*tensors(data))
    np.testing.assert_allclose(float(loss), loss_of(before, data), rtol=2e-6)
    np.testing.assert_array_equal(aux[0].asnumpy(), data[0])
    np.testing.assert_array_equal(aux[1].asnumpy(), data[2])
    network, cell = trained(Tokens(weight_as="number"))
    cell(*tensors(batch(3)))
    np.testing.assert_allclose(weight_of(network), before - LEARNING_RATE * gradient(before, [batch(3)]), rtol=2e-6)


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


@quick_in_pynative_mode
@pytest.mark.parametrize(("how", "steps"), [("eagerly", 2), *slow(("in_jit", 2), ("eagerly", 1))])
def test_a_manual_step_gives_the_same_bits(mode, how, steps):
    keywords = {"gradient_accumulation_steps": steps, "clip_norm": 0.7, "ema_decay": 0.5}
    _, cell = trained(**keywords)
    step, train_step = manual(how, Tokens(), **keywords)
    for seed, count in enumerate((1, 4, 0, 6, 2)):
        cell(*tensors(batch(count, seed)))
        train_step(*tensors(batch(count, seed)))
    cell.flush(), step.flush()
    assert not changed(*of_both(cell, step))


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
