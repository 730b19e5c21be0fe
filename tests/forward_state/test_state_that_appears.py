"""State that appears after a training cell was constructed is taken in before the next call, or at least named."""

import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, nn, ops
from support.networks import FEATURES, batch, batch_for

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


def of_one(network, **keywords):
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()


class Appearing(nn.Cell):
    """Holds what a test gives it while it trains."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(FEATURES, 1)
        self.parts, self.memories, self.has_lazy = nn.CellList([]), [], False

    def write(self, memory, x):
        ops.assign(memory, memory * 0.5 + ops.ReduceMean()(x, 0))

    def construct(self, x, y):
        for part in self.parts:
            x = part(x)
        for memory in self.memories:
            self.write(memory, x)
        if self.has_lazy:
            if not hasattr(self, "lazy"):
                self.lazy = average("lazy")
            self.write(self.lazy, x)
        return ops.square(self.head(x) - y).mean()


class Layer(nn.Cell):
    def construct(self, x):
        self.seen.copy_(self.seen * 0.5 + ops.ReduceMean()(x, 0))
        return x


def average(name):
    return Parameter(Tensor(np.ones(FEATURES, np.float32)), name=name, requires_grad=False)


def check_that_it_is_taken_in(cell, memory, name):
    """Makes the call after state has appeared, and a step that is skipped. `memory` returns the state."""
    with pytest.warns(RuntimeWarning, match=rf"may write .*\b{name}\b.*, which appeared after construction"):
        assert not bool(cell(*batch(0))[1].asnumpy())
    before = memory().asnumpy().copy()
    assert bool(cell(*batch_for(True))[1].asnumpy())
    np.testing.assert_array_equal(memory().asnumpy(), before)
    assert not bool(cell(*batch(1))[1].asnumpy())
    assert not np.array_equal(memory().asnumpy(), before)


def test_before_the_first_step(mode):
    network = Appearing()
    cell = of_one(network)
    assert cell.forward_state_names() == []
    network.parts.append(nn.BatchNorm1d(FEATURES).set_train())
    check_that_it_is_taken_in(cell, lambda: network.parts[0].moving_mean, "0.moving_mean")
    assert cell.forward_state_names() == ["0.moving_mean", "0.moving_variance"]


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
@pytest.mark.parametrize("keywords", [{}, *slow({"max_retries": 1})])
def test_between_steps(mode, keywords):
    network = Appearing()
    cell = of_one(network, **keywords)
    network.has_lazy = True
    cell(*batch(0))
    check_that_it_is_taken_in(cell, lambda: network.lazy, "lazy")
    del network.lazy
    network.lazy = average("anew")
    check_that_it_is_taken_in(cell, lambda: network.lazy, "anew")
    network.parts.append(nn.BatchNorm1d(FEATURES).set_train())
    check_that_it_is_taken_in(cell, lambda: network.parts[0].moving_mean, "0.moving_mean")
    layer = Layer()
    layer.register_buffer("seen", Tensor(np.ones(FEATURES, np.float32)))
    network.parts.append(layer)
    check_that_it_is_taken_in(cell, lambda: layer.seen, "parts.1.seen")
    assert len(cell.forward_state_names()) == 5


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_is_in_no_cell_is_found_by_a_walk(mode):
    network = Appearing()
    cell = of_one(network)
    cell(*batch(0))
    network.memories.append(average("listed"))
    with pytest.warns(RuntimeWarning, match="no checkpoint has them"):
        check_that_it_is_taken_in(cell, lambda: network.memories[0], "listed")


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_in_a_cycle_it_is_warned_of(mode):
    network = Appearing()
    cell = of_one(network, gradient_accumulation_steps=2)
    cell(*batch(0))
    network.parts.append(nn.BatchNorm1d(FEATURES).set_train())
    with pytest.warns(RuntimeWarning, match="0.moving_mean, 0.moving_variance, .* a skipped step does not"):
        cell(*batch(1))
