"""A ManualStep takes the gradients that a `.backward()` has left in the weights, and clears them there."""

import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, _c_expression, nn
from mindspore.ops.composite.base import _pynative_executor
from support.manual_training import CYCLE, Halve, batch, batches, dynamic, manual, training_cell
from support.refused import refused
from support.training import changed, of_both, state

from ms_lossscale import ManualStep

pytestmark = [
    pytest.mark.parametrize("mode", ["pynative"], indirect=True),
    pytest.mark.skipif(not hasattr(_c_expression, "run_backward"), reason="this MindSpore has no such machinery"),
]


@pytest.fixture(autouse=True)
def _stop_recording(mode):
    yield
    _pynative_executor.set_grad_flag(False)
    _pynative_executor.clear_res()


def record():  # Makes MindSpore record what follows, as it always does from the version on that has `Tensor.backward`.
    _pynative_executor.set_grad_flag(True)


def backward(loss):
    """What `loss.backward()` is to do. MindSpore 2.10 has no such method, but the machinery that is under it, which
    leaves the gradients in `._grad` of each weight."""
    _c_expression.run_backward((loss,), None, None, False, None, allow_unreachable=True, accumulate_grad=True)


def train_step_by_backward(step, networks):
    def train_step(x, y):
        x, y = step.begin(x, y)
        record()
        losses = [network(x, y) for network in networks]
        for i, loss in enumerate(losses):
            backward(step.scale(loss, i))
        return losses, step.end()

    return train_step


def held(step):  # What the weights hold.
    several = isinstance(step.parameters[0], tuple)
    return [weight._grad for its in (step.parameters if several else [step.parameters]) for weight in its]


@pytest.mark.parametrize(
    ("count", "keywords"),
    [
        (1, dict),
        *slow(
            (1, lambda: CYCLE),
            # Its end is not compiled.
            (1, lambda: {"gradient_transforms": [Halve()]}),
            (2, lambda: {"clip_norm": 0.5}),
        ),
    ],
)
def test_the_same_bits_as_a_training_cell(mode, count, keywords):
    cell = training_cell(dynamic(), count, **keywords())
    step, networks, _ = manual(dynamic(), count=count, **keywords())
    train_step = train_step_by_backward(step, networks)
    for data in batches("...x...."):
        expected = cell(*data)
        losses, overflow = train_step(*data)
        assert bool(overflow) == bool(expected[1])
        np.testing.assert_array_equal(sum(losses).asnumpy(), expected[0].asnumpy())
        assert held(step) == [None] * len(held(step))
        assert not changed(*of_both(cell, step))
    assert cell.counters()["skipped_steps"] == 1


class TwoWeights(nn.Cell):
    def __init__(self):
        super().__init__()
        self.used = Parameter(Tensor([1.0, 2.0]), name="used")
        self.unused = Parameter(Tensor([[3.0]]), name="unused")

    def construct(self, x):
        return (self.used * x).sum()


def test_several_backwards_add_up_and_a_weight_without_a_gradient_has_one_of_zeros(mode):
    """An optimizer with momentum moves it on, as where MindSpore gives the zeros."""
    network = TwoWeights()
    optimizer = nn.Momentum(network.trainable_params(), 0.5, 0.5, weight_decay=0.25)
    step = ManualStep(network, optimizer, 2.0**4)
    used, unused, moments = np.array([1.0, 2.0]), 3.0, [0.0, 0.0]
    for x in (1.0, 2.0):
        step.begin()
        record()
        for factor in (1.0, 4.0, -2.0):
            backward(step.scale(network(Tensor(factor * x))))
        assert network.unused._grad is None
        assert not bool(step.end())
        moments = [0.5 * moments[0] + 3 * x + 0.25 * used, 0.5 * moments[1] + 0.25 * unused]
        used, unused = used - 0.5 * moments[0], unused - 0.5 * moments[1]
        # Sums of a few powers of two: float32 has them exactly.
        np.testing.assert_array_equal(network.used.asnumpy(), used)
        np.testing.assert_array_equal(network.unused.asnumpy(), [[unused]])


def test_what_a_step_that_was_given_up_has_left_does_not_count_and_none_is_refused(mode):
    step, networks, _ = manual(dynamic())
    expected, its_networks, _ = manual(dynamic())
    train_step = train_step_by_backward(step, networks)
    x, y = step.begin(*batch(5))
    record()
    backward(step.scale(networks[0](x, y)))
    assert held(step)[0] is not None
    train_step(*batch(0))
    train_step_by_backward(expected, its_networks)(*batch(0))
    assert not changed(state(expected), state(step))
    x, y = step.begin(*batch(1))
    networks[0](x, y)
    before = state(step)
    refused(step.end, RuntimeError, "'ManualStep', 'end()' without gradients", "there are none", "end(grads)")
    assert not changed(before, state(step))
    assert not bool(train_step(*batch(1))[1])
