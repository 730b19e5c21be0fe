"""
Tests for a process of their own: a compilation that fails leaves MindSpore in a state in which later ones fail, too.

What MindSpore's errors mean is said, where they do not say it; a user's own errors stay as they are.
"""

import mindspore
import numpy as np
import pytest
from conftest import MODES
from mindspore import Tensor, nn, ops
from mindspore.experimental.optim import AdamW
from support.networks import Linear, batch, weight

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell

# A network's own errors.


class WithJit(Linear):
    """A network of which MindSpore compiles one method by itself, in PyNative mode."""

    @mindspore.jit
    def doubled(self, x):
        return x * 2

    def construct(self, x, y):
        if len(x.shape) != 2:
            raise RuntimeError("x must have two dimensions")
        if len(y.shape) != 2:
            raise TypeError("y must have two dimensions")
        return super().construct(self.doubled(x), y)


def with_jit():
    network = WithJit()
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.01), DynamicLossScale()).set_train()


def test_a_networks_own_error_stays_as_it_is(mode):
    cell = with_jit()
    good = batch(0)
    cell(*good)
    for bad, error in enumerate((RuntimeError, TypeError)):
        inputs = list(good)
        inputs[bad] = Tensor(np.ones(3, np.float32))
        # Graph mode quotes it.
        with pytest.raises(error, match=f"^'?{'xy'[bad]} must have two dimensions") as raised:
            cell(*inputs)
        assert raised.type is error
        assert raised.value.__cause__ is None
    # Nor are wrong inputs, MindSpore's own error, taken for something else.
    with pytest.raises(TypeError) as raised:
        cell(*good, good[1])
    assert "in one mode only" not in str(raised.value)
    assert raised.value.__cause__ is None


# The gradient of a critic that another loss calls, too.


@pytest.fixture
def in_graph_mode():
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=MODES["graph"])
    yield
    mindspore.set_context(mode=before)


class Matrix(nn.Cell):
    def __init__(self, name):
        super().__init__()
        self.weight = weight(2, 2, name=name)

    def construct(self, x):
        return ops.tanh(ops.matmul(x, self.weight))


class Score(nn.Cell):
    """The generator's loss."""

    def __init__(self, generator, critic):
        super().__init__(auto_prefix=False)
        self.generator, self.critic = generator, critic

    def construct(self, x):
        return -self.critic(self.generator(x)).mean()


class Penalized(nn.Cell):
    """The critic's loss."""

    def __init__(self, critic):
        super().__init__(auto_prefix=False)
        self.critic, self.gradient = critic, ops.GradOperation()(critic)

    def construct(self, x):
        return self.critic(x).mean() + ops.square(self.gradient(x)).sum()


class OfAMethod(Penalized):
    def __init__(self, critic):
        super().__init__(critic)
        self.gradient = ops.GradOperation()(self.score)

    def score(self, x):
        return self.critic(x)


def generator_and_critic(penalized=Penalized):
    """The networks and their losses, in this order."""
    generator, critic = Matrix("generator"), Matrix("critic")
    return [generator, critic], [Score(generator, critic), penalized(critic)]


X = Tensor(np.ones((3, 2), np.float32))


def alternating(penalized, order):
    networks, losses = (each[::order] for each in generator_and_critic(penalized))
    return AlternatingTrainOneStepCell(losses, [nn.SGD(network.trainable_params(), 0.01) for network in networks], 16.0)


@pytest.mark.parametrize("order", [1, -1])
def test_the_gradient_of_a_critic_that_another_loss_calls(in_graph_mode, order):
    with pytest.raises(RuntimeError, match="Take the gradient of a method of the loss cell instead") as raised:
        alternating(Penalized, order)(X)
    assert any(part in str(raised.value.__cause__) for part in ("Illegal AnfNode", "real_primal_func"))
    # The cure.
    cell = alternating(OfAMethod, order)
    assert not cell(X)[1].asnumpy().any()


def test_an_optimizer_that_mindspore_compiled_by_itself_can_not_be_compiled_again():
    network = Linear()
    cell = ScaledTrainOneStepCell(network, AdamW(network.trainable_params(), 0.01), DynamicLossScale())
    before = mindspore.get_context("mode")
    try:
        mindspore.set_context(mode=MODES["pynative"])
        cell(*batch(0))
        mindspore.set_context(mode=MODES["graph"])
        with pytest.raises(RuntimeError, match="'implementation' of it was compiled by itself, in PYNATIVE_MODE"):
            cell(*batch(1))
    finally:
        mindspore.set_context(mode=before)


squared = ops.MultitypeFuncGraph("squared")


@squared.register("Tensor")
def _squared_tensor(x):
    return x * x


def test_mindspore_forgets_the_length_of_a_tuple_that_goes_through_a_loop(in_graph_mode):
    """Why the tries of a step hand their tensors on one by one."""

    class Loop(nn.Cell):
        def __init__(self):
            super().__init__()
            self.zero, self.each = Tensor(0.0), ops.HyperMap()

        def construct(self, x):
            pair = (x, x + x)
            while x > self.zero:
                x = x - x
                pair = (x, x + x)
            return ops.stack(self.each(squared, pair))

    with pytest.raises(TypeError, match="not subscriptable"):
        Loop()(Tensor(1.0))
