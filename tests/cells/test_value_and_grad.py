"""`ManualStep.value_and_grad`: bit for bit what is scaled by hand, eagerly and compiled, and what it refuses."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops

from ms_lossscale import DynamicLossScale, ManualStep

X = Tensor(np.random.RandomState(0).randn(8, 4).astype(np.float32))
Y = Tensor(np.ones((8, 1), np.float32))
OVERFLOWING = X * float("inf")


def networks(count):
    mindspore.set_seed(0)
    made = [nn.SequentialCell(nn.Dense(4, 3), nn.BatchNorm1d(3), nn.Dense(3, 1)).set_train() for _ in range(count)]
    for i, network in enumerate(made):
        network.update_parameters_name(f"{i}.")
    return made


def trained(make_step, compiled, count=1, **keywords):
    """Trains five steps, the second of which overflows. Returns the losses, the overflows, and all state."""
    nets = networks(count)
    optimizers = [nn.Adam(network.trainable_params(), 1e-2) for network in nets]
    scale = DynamicLossScale(2.0**20) if count == 1 else [DynamicLossScale(2.0**20), DynamicLossScale(2.0**10)]
    step = ManualStep(nets, optimizers if count > 1 else optimizers[0], scale, **keywords)
    train_step = make_step(step, nets)
    if compiled:
        train_step = mindspore.jit(train_step)
    results = [train_step(x, Y) for x in (X, OVERFLOWING, X, X * 2, X)]
    returned = [[each.asnumpy() for each in its] for its in results]
    return returned, {name: its.asnumpy() for name, its in step.parameters_dict().items()}


def by_value_and_grad(step, nets):
    def loss_of(net):
        def forward(x, y):
            return ops.square(net(x) - y).mean()

        return forward

    derivatives = [step.value_and_grad(loss_of(net), i) for i, net in enumerate(nets)]

    def train_step(x, y):
        x, y = step.begin(x, y)
        losses, grads = (), ()
        for derivative in derivatives:
            loss, its = derivative(x, y)
            losses, grads = losses + (loss,), grads + (its,)
        return losses + (step.end(*grads),)

    return train_step


def by_hand(step, nets):
    weights = step.parameters if len(nets) > 1 else (step.parameters,)

    def scaled(i, net):
        def forward(x, y):
            loss = ops.square(net(x) - y).mean()
            return step.scale(loss, i), loss

        return mindspore.value_and_grad(forward, None, weights[i], has_aux=True)

    derivatives = [scaled(i, net) for i, net in enumerate(nets)]

    def train_step(x, y):
        x, y = step.begin(x, y)
        losses, grads = (), ()
        for derivative in derivatives:
            (_, loss), its = derivative(x, y)
            losses, grads = losses + (loss,), grads + (its,)
        return losses + (step.end(*grads),)

    return train_step


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("count, keywords", [(1, {}), *slow((2, {"clip_norm": 1.0, "gradient_accumulation_steps": 2}))])
def test_the_same_bits_as_scaled_by_hand(mode, compiled, count, keywords):
    ours, its_state = trained(by_value_and_grad, compiled, count, **keywords)
    others, other_state = trained(by_hand, compiled, count, **keywords)
    assert its_state.keys() == other_state.keys()
    for name, value in its_state.items():
        np.testing.assert_array_equal(value, other_state[name], err_msg=name)
    np.testing.assert_array_equal(ours, others)
    assert any(bool(its[-1]) for its in ours) and not all(bool(its[-1]) for its in ours)


def one_step(**keywords):
    (network,) = networks(1)
    return network, ManualStep(network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(2.0**10), **keywords)


@pytest.mark.parametrize("compiled", [False, True])
def test_aux_and_a_loss_of_any_shape(mode, compiled):
    network, step = one_step()

    def forward(x, y):
        output = network(x)
        return ops.square(output - y), output, x

    value_and_grad = step.value_and_grad(forward, has_aux=True)

    def train_step(x, y):
        x, y = step.begin(x, y)
        (loss, output, seen), grads = value_and_grad(x, y)
        return loss, output, seen, grads, step.end(grads)

    loss, output, seen, grads, overflow = (mindspore.jit(train_step) if compiled else train_step)(X, Y)
    np.testing.assert_allclose(loss.asnumpy(), np.square(output.asnumpy() - 1), rtol=1e-6)
    np.testing.assert_array_equal(seen.asnumpy(), X.asnumpy())
    # The bias of the last layer: the gradient of the loss's sum, times the scale.
    np.testing.assert_allclose(grads[-1].asnumpy(), 2.0**10 * 2 * (output.asnumpy() - 1).sum(), rtol=1e-5)
    assert not bool(overflow)


@quick_in_pynative_mode
def test_eagerly_outside_of_a_step_it_raises(mode):
    network, step = one_step()
    value_and_grad = step.value_and_grad(lambda x, y: ops.square(network(x) - y).mean())
    for call in (lambda: value_and_grad(X, Y), lambda: step.scale(Tensor(1.0)), lambda: step.end(())):
        with pytest.raises(RuntimeError, match=r"no step has begun.*begin\(\*inputs\)"):
            call()
    step.begin(X, Y)
    step.end(value_and_grad(X, Y)[1])
    with pytest.raises(RuntimeError, match="no step has begun"):
        value_and_grad(X, Y)


def test_begin_end_and_the_others_are_documented_members():
    for name, word in {"begin": "inputs", "end": "grads", "flush": "cycle", "value_and_grad": "function"}.items():
        assert word in getattr(ManualStep, name).__doc__


@pytest.mark.parametrize("mode", ["graph"], indirect=True)
def test_eagerly_the_end_of_a_step_is_compiled_once(mode):
    # MindSpore takes a tuple of Tensors that is passed to a Cell for a constant, unless it is `mutable`.
    (net,) = networks(1)
    step = ManualStep(net, nn.Adam(net.trainable_params(), 1e-2), DynamicLossScale(2.0**10))
    train_step = by_value_and_grad(step, [net])
    for x in (X, OVERFLOWING, X):
        train_step(x, Y)
    assert len(step._calls.end.compile_cache) == 1
