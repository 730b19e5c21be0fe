"""`ManualStep.value_and_grad`: bit for bit what is scaled by hand, eagerly and compiled, and what it refuses."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, ops
from support.manual_training import batch, batches, manual
from support.training import changed, state

from ms_lossscale import DynamicLossScale

in_all_pairs = pytest.mark.parametrize(
    ("mode", "how"),
    [("graph", "in_jit"), ("pynative", "eagerly"), *slow(("graph", "eagerly"), ("pynative", "in_jit"))],
    indirect=["mode"],
)


def by_value_and_grad(step, networks, how):
    derivatives = [step.value_and_grad(network, i) for i, network in enumerate(networks)]

    def train_step(x, y):
        x, y = step.begin(x, y)
        losses, grads = (), ()
        for derivative in derivatives:
            loss, its = derivative(x, y)
            losses, grads = losses + (loss,), grads + (its,)
        return losses, step.end(*grads)

    return mindspore.jit(train_step) if how == "in_jit" else train_step


@in_all_pairs
@pytest.mark.parametrize("count, keywords", [(1, {}), *slow((2, {"clip_norm": 1.0, "gradient_accumulation_steps": 2}))])
def test_the_same_bits_as_scaled_by_hand(mode, how, count, keywords):
    def scales():
        its = [DynamicLossScale(2.0**20), DynamicLossScale(2.0**10)]
        return its if count == 2 else its[0]

    step, networks, _ = manual(scales(), count=count, **keywords)
    other, _, by_hand = manual(scales(), how, count, **keywords)
    train_step, overflows = by_value_and_grad(step, networks, how), []
    for data in batches(".x..."):
        (losses, overflow), (its_losses, its_overflow) = train_step(*data), by_hand(*data)
        np.testing.assert_array_equal([each.asnumpy() for each in losses], [each.asnumpy() for each in its_losses])
        assert bool(overflow) == bool(its_overflow)
        overflows.append(bool(overflow))
        assert not changed(state(step), state(other))
    assert set(overflows) == {False, True}
    if (mode, how) == ("graph", "eagerly"):
        # MindSpore takes a tuple of Tensors that is passed to a Cell for a constant, unless it is `mutable`.
        assert len(step._run_end.compile_cache) == 1


@in_all_pairs
def test_aux_and_a_loss_of_any_shape(mode, how):
    step, (network,), _ = manual(DynamicLossScale(2.0**10))

    def forward(x, y):
        output = network.net(x)
        return ops.square(output - y), output, x

    value_and_grad = step.value_and_grad(forward, has_aux=True)

    def train_step(x, y):
        x, y = step.begin(x, y)
        (loss, output, seen), grads = value_and_grad(x, y)
        return loss, output, seen, grads, step.end(grads)

    x, y = batch(0)
    loss, output, seen, grads, overflow = (mindspore.jit(train_step) if how == "in_jit" else train_step)(x, y)
    errors = output.asnumpy() - y.asnumpy()
    np.testing.assert_allclose(loss.asnumpy(), np.square(errors), rtol=1e-6)
    np.testing.assert_array_equal(seen.asnumpy(), x.asnumpy())
    # The bias of the last layer: the gradient of the loss's sum, times the scale.
    np.testing.assert_allclose(grads[-1].asnumpy(), [2.0**10 * 2 * errors.sum()], rtol=1e-5)
    assert not bool(overflow)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)  # In graph mode, MindSpore's take none, either.
def test_keyword_arguments_as_of_mindspores_own(mode):
    step, (network,), _ = manual(2.0**10)

    def forward(x, y=None, *, factor=1.0):
        return factor * network(x, y)

    x, y = batch(0)
    its_loss, its_grads = mindspore.value_and_grad(forward, None, step.parameters)(x, y=y, factor=0.5)
    step.begin(x, y)
    loss, grads = step.value_and_grad(forward)(x, y=y, factor=0.5)
    assert float(loss) == float(its_loss)
    for grad, its_grad in zip(grads, its_grads):
        np.testing.assert_array_equal(grad.asnumpy(), 2.0**10 * its_grad.asnumpy())
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        step.value_and_grad(forward)(x, y, other=0.5)


@quick_in_pynative_mode
def test_eagerly_outside_of_a_step_it_raises(mode):
    step, (network,), _ = manual(DynamicLossScale(2.0**10))
    value_and_grad, data = step.value_and_grad(network), batch(0)
    for call in (lambda: value_and_grad(*data), lambda: step.scale(Tensor(1.0)), lambda: step.end(())):
        with pytest.raises(RuntimeError, match=r"no step has begun.*begin\(\*inputs\)"):
            call()
    step.begin(*data)
    step.end(value_and_grad(*data)[1])
    with pytest.raises(RuntimeError, match="no step has begun"):
        value_and_grad(*data)


@in_all_pairs
def test_scale_beside_it(mode, how):
    step, (network,), _ = manual(DynamicLossScale(2.0**10))
    value_and_grad = step.value_and_grad(network)

    def train_step(x, y):
        x, y = step.begin(x, y)
        before = step.scale(Tensor(1.0))
        first, grads = value_and_grad(x, y)
        between = step.scale(first)
        second = value_and_grad(x[:4], y[:4])[0]
        return before, first, between, second, step.scale(second), step.end(grads)

    train_step = mindspore.jit(train_step) if how == "in_jit" else train_step
    before, first, between, second, after, overflow = train_step(*batch(0))
    assert float(before) == 2.0**10
    assert float(between) == 2.0**10 * float(first)
    assert float(after) == 2.0**10 * float(second)
    assert not overflow


@in_all_pairs
def test_gradients_in_a_list(mode, how):
    step, networks, _ = manual(DynamicLossScale(2.0**10))
    other, its_networks, _ = manual(DynamicLossScale(2.0**10))
    value_and_grad, its_train_step = step.value_and_grad(networks[0]), by_value_and_grad(other, its_networks, how)

    def train_step(x, y):
        loss, grads = value_and_grad(*step.begin(x, y))
        return loss, step.end(list(grads))

    train_step = mindspore.jit(train_step) if how == "in_jit" else train_step
    for data in batches(".x."):
        assert bool(train_step(*data)[1]) == bool(its_train_step(*data)[1])
    assert not changed(state(step), state(other))
