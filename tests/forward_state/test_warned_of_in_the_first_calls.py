"""What moves in the first calls although no skipped step restores it, or although it is frozen, is named, once."""

import warnings

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from support.manual_training import train_step_of
from support.networks import FEATURES, Linear, batch_for
from support.training import cell_of

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

LARGE = 10**6 + 1


class Moving(nn.Cell):
    """Its forward moves `mean`, which is trained or frozen, small or large."""

    def __init__(self, requires_grad=True, size=FEATURES):
        super().__init__()
        self.head = nn.Dense(FEATURES, 1)
        self.mean = Parameter(Tensor(np.zeros(size, np.float32)), name="mean", requires_grad=requires_grad)

    def construct(self, x, y):
        moved = self.mean[:FEATURES] * 0.5 + ops.ReduceMean()(ops.stop_gradient(x), 0)
        ops.assign(self.mean, ops.concat((moved, self.mean[FEATURES:])))
        return ops.square(self.head(x) - y).mean()


def told(kind, network, overflows, weights=None, steps=1, **keywords):
    """Returns the warnings of one call for each letter, `x` for one that overflows, and the call that each came in."""
    optimizer = nn.SGD(network.trainable_params() if weights is None else weights, 0.01)
    scale = DynamicLossScale(2.0**10)
    cell = cell_of(kind, [network], [optimizer], scale, gradient_accumulation_steps=steps, **keywords)
    call = train_step_of(cell, [network]) if kind == "manual" else cell
    found = []
    for i, letter in enumerate(overflows):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(*batch_for(letter == "x", i))
        found += [(i, str(warning.message)) for warning in caught if str(warning.message).startswith("For '")]
    return found


TRAINED = "the forward wrote mean, which an optimizer trains, too, so that a skipped step does not restore"


@pytest.mark.parametrize("kind", ["scaled", *slow("manual")])
def test_a_trained_parameter_that_the_forward_moves_is_named_at_the_first_skip(mode, kind):
    ((call, message),) = told(kind, Moving(), ".x.x")
    assert (call, TRAINED in message) == (1, True)


class ByItself(ScaledTrainOneStepCell):  # As subclasses of MindSpore's cell are written.
    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer(grads))


def test_a_construct_of_ones_own_that_makes_no_step_is_named(mode):
    network = Linear()
    cell = ByItself(network, nn.SGD(network.trainable_params(), 0.01), DynamicLossScale()).set_train()
    with pytest.warns(RuntimeWarning, match=r"A construct of your own calls super\(\).construct"):
        cell(*batch_for(False, 0))


@quick_in_pynative_mode
def test_or_in_the_first_call_of_a_cycle(mode):
    ((call, message),) = told("scaled", Moving(), "....", steps=2)
    assert (call, TRAINED in message) == (0, True)


@quick_in_pynative_mode
@pytest.mark.parametrize("requires_grad", [True, False])
def test_one_that_no_optimizer_trains_is_named_at_once(mode, requires_grad):
    network = Moving(requires_grad, LARGE)
    ((call, message),) = told("scaled", network, "..x", weights=network.head.trainable_params())
    assert (call, "the forward wrote mean, which a skipped step does not restore" in message) == (0, True)


@quick_in_pynative_mode
def test_what_is_restored_is_not_named(mode):
    network = Moving()
    assert told("scaled", network, "x..x", forward_state=[network.mean]) == []
    assert told("scaled", Moving(requires_grad=False), "x..x") == []
    assert told("scaled", Moving(), "...x") == []


@quick_in_graph_mode
@pytest.mark.parametrize("kind", ["scaled", *slow("manual")])
def test_a_weight_that_is_frozen_after_its_optimizer_was_made(mode, kind):
    network = nn.WithLossCell(nn.SequentialCell(nn.Dense(FEATURES, 2), nn.Dense(2, 1)), nn.MSELoss())
    weights = network.trainable_params()
    weights[0].requires_grad = False
    before = weights[0].asnumpy().copy()
    found = told(kind, network, "x..", weights=weights)
    if mode == "pynative":
        assert found == []
        return
    assert not np.array_equal(weights[0].asnumpy(), before)
    ((call, message),) = found
    assert (call, f"an optimizer moved {weights[0].name}, frozen after" in message) == (1, True)
