"""Networks that take a gradient in their forward: PyNative mode loses its gradients, and the diagnoses know."""

import warnings

import mindspore
import numpy as np
import pytest
from mindspore import ParameterTuple, nn, ops
from support.in_mode import in_mode
from support.networks import FEATURES, Linear, batch, weight
from support.untouched import untouched

from ms_lossscale import ScaledTrainOneStepCell, locate_overflow, profile_activations, profile_gradients

pytestmark = pytest.mark.slow

BATCHES = [batch(seed) for seed in range(3)]
LOSES = "takes a gradient in its forward, and MindSpore's PyNative mode loses the gradients of that gradient"


class Critic(nn.Cell):
    """Samples to scores."""

    def __init__(self):
        super().__init__()
        self.hidden = weight(FEATURES, 5, name="hidden")
        self.score = weight(5, 1, seed=1, name="score")

    def construct(self, x):
        return ops.matmul(ops.tanh(ops.matmul(x, self.hidden)), self.score)


class Penalty(nn.Cell):
    """The mean score, and a penalty of the critic's gradient by its input."""

    def __init__(self, factor=10.0):
        super().__init__()
        self.critic = Critic()
        self.factor = factor
        self.gradient = ops.GradOperation()

    def of_input(self, x):
        return self.gradient(self.critic)(x)

    def construct(self, x, y):
        slopes = ops.square(self.of_input(2.0 * x)).sum(1)
        return ((self.critic(x) - y).mean() + ops.square(slopes - 1.0).mean()) * self.factor


class MadeAtConstruction(Penalty):
    def __init__(self):
        super().__init__()
        self.made = ops.grad(self.critic)

    def of_input(self, x):
        return self.made(x)


class ByVjp(Penalty):
    def of_input(self, x):
        scores, vjp = ops.vjp(self.critic, x)
        return vjp(ops.ones_like(scores))[0]


PENALTIES = [Penalty, MadeAtConstruction, ByVjp]


def loss_and_gradients(network, x, y):
    """The loss of a Penalty, and its gradients, by NumPy."""
    hidden, score = (each.asnumpy().astype(np.float64) for each in (network.critic.hidden, network.critic.score))
    x, y = x.asnumpy().astype(np.float64), y.asnumpy()
    outputs, inner = np.tanh(x @ hidden), np.tanh(2 * x @ hidden)
    steep, inner_steep = 1 - outputs**2, 1 - inner**2
    slope = (inner_steep * score[:, 0]) @ hidden.T
    excess = (slope**2).sum(1) - 1
    loss = (outputs @ score - y).mean() + (excess**2).mean()
    by_slope = 4 * excess[:, None] * slope / len(x)
    by_inner_steep = by_slope @ hidden * score[:, 0]
    by_hidden = x.T @ (steep * score[:, 0]) / len(x)
    by_hidden += by_slope.T @ (inner_steep * score[:, 0]) - 4 * x.T @ (by_inner_steep * inner * inner_steep)
    by_score = outputs.mean(0) + (by_slope @ hidden * inner_steep).sum(0)
    return loss * network.factor, [by_hidden * network.factor, by_score[:, None] * network.factor]


@pytest.fixture
def in_graph_mode():
    with in_mode(mindspore.GRAPH_MODE):
        yield


def assert_right(distributions, network):
    """Whether these distributions are of the gradients that NumPy computes."""
    of_batches = [loss_and_gradients(network, *inputs)[1] for inputs in BATCHES]
    for distribution, *grads in zip(distributions, *of_batches):
        assert distribution.count == np.size(grads)
        np.testing.assert_allclose(distribution.max, np.max(np.abs(grads)), rtol=1e-5)


# MindSpore's fault.


def test_mindspore_loses_second_derivatives_in_pynative_mode(mode):
    class SquaredSlope(nn.Cell):
        def __init__(self):
            super().__init__()
            self.critic, self.gradient = Critic(), ops.GradOperation()

        def construct(self, x):
            return ops.square(self.gradient(self.critic)(x)).sum()

    network, x = SquaredSlope(), BATCHES[0][0]
    (gradient,) = ops.grad(network, None, ParameterTuple([network.critic.score]))(x)
    # It is quadratic in these weights, so that this is Euler's theorem.
    holds = np.isclose(float((gradient * network.critic.score).sum()), 2 * float(network(x)), rtol=1e-4)
    # If it holds in PyNative mode, too, MindSpore has mended it, and LossAndGrads need not care any more.
    assert holds == (mode == "graph")


# profile_gradients.


def quietly(function, *args, **keywords):
    """The value of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return function(*args, **keywords)


@pytest.mark.parametrize("make", PENALTIES, ids=lambda make: make.__name__)
def test_a_gradient_penalty_is_profiled_as_it_is(mode, make):
    network = make()
    with untouched(network):
        if mode == "graph":
            report = quietly(profile_gradients, network, batches=BATCHES)
        else:
            with pytest.warns(RuntimeWarning, match=f"'{make.__name__}' {LOSES}: training in it lacks them"):
                report = profile_gradients(network, batches=BATCHES)
    assert_right(report.parameters.values(), network)


def test_a_training_cell_with_a_gradient_penalty(in_graph_mode):
    network = Penalty()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 1e-3), 1024.0)
    cell(*BATCHES[0])
    with untouched(cell):
        report = quietly(profile_gradients, cell, BATCHES)
    assert_right(report.parameters.values(), network)
    # The compiled step goes on.
    before = [each.asnumpy().copy() for each in network.trainable_params()]
    grads = loss_and_gradients(network, *BATCHES[1])[1]
    cell(*BATCHES[1])
    for weight_before, weight_now, grad in zip(before, network.trainable_params(), grads):
        np.testing.assert_allclose(weight_now.asnumpy(), weight_before - 1e-3 * grad, rtol=1e-4, atol=1e-6)


def test_an_ordinary_network_is_not_compiled(mode):
    assert quietly(profile_gradients, Eager(Linear()), batches=BATCHES).batches == 3


class Eager(nn.Cell):
    """What graph mode does not compile."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, y):
        try:
            return self.network(x, y)
        except ZeroDivisionError:
            return y.sum()


def test_what_does_not_compile_is_profiled_with_a_warning(mode):
    network = Eager(Penalty())
    with untouched(network), pytest.warns(RuntimeWarning, match=LOSES) as caught:
        report = profile_gradients(network, batches=BATCHES)
    assert report.batches == 3
    (message,) = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert message.startswith(
        f"For 'profile_gradients', 'Eager' {LOSES}, and the network could not be computed in graph mode, which keeps "
        "them: the gradients that are reported lack them. Graph mode's error: "
    )


# The other diagnoses.


def test_profile_activations_says_what_is_missing(mode):
    message = f"'profile_activations', 'Penalty' {LOSES}: what flows back into its cells is reported without them"
    network = Penalty()
    with untouched(network), pytest.warns(RuntimeWarning, match=message):
        profile_activations(network, BATCHES)
    quietly(profile_activations, Linear(), BATCHES)


def test_locate_overflow_sees_the_gradients_of_a_gradient(mode):
    network, inputs = Penalty(), BATCHES[1]
    largest = max(np.abs(grad).max() for grad in loss_and_gradients(network, *inputs)[1])
    loss_scale = 65504 / largest
    with untouched(network):
        assert not locate_overflow(network, inputs, loss_scale=0.99 * loss_scale).found
        trace = quietly(locate_overflow, network, inputs, loss_scale=1.01 * loss_scale)
    assert (trace.found, trace.cell, trace.direction, trace.kind) == (True, "critic", "backward", "saturated")
    assert trace.what == "critic.score"
    assert abs(trace.value) == pytest.approx(1.01 * 65504, rel=1e-5)
