"""Very large scales: gradients are right, or the scale is refused, also where gradients are accumulated."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor
from support.networks import Linear, batch
from support.training import assert_equal_weights, by_sgd

from ms_lossscale import DynamicLossScale, FixedLossScale, LossScale, ScheduledLossScale

# The largest scale for so many calls in a cycle: 1 / calls / scale is a normal float32, which 2**-126 is.
LARGEST = {1: 2.0**126, 3: 2.0**124}


class Doubles(LossScale):
    def next_scale(self, loss_scale, overflow):
        return loss_scale * 2.0


def cell_of(loss_scale, steps):
    return by_sgd(Linear(), loss_scale, gradient_accumulation_steps=steps)


def call(cell):
    # So small that the loss times the largest scale is finite.
    return cell(*(Tensor(tensor.asnumpy() / 8) for tensor in batch()))


def trained(loss_scale, steps):
    cell = cell_of(loss_scale, steps)
    for _ in range(steps):
        assert not call(cell)[1].asnumpy()
    assert cell.counters()["applied_steps"] == 1
    return cell.network


@quick_in_graph_mode
@pytest.mark.parametrize("steps", [*slow(1), 3])
def test_gradients_are_exact_at_the_largest_scale(mode, steps):
    expected = trained(1.0, steps)
    assert not np.array_equal(expected.weight.asnumpy(), Linear().weight.asnumpy())
    assert_equal_weights(trained(LARGEST[steps], steps), expected)


def test_one_that_was_set_before_is_refused_too():
    for loss_scale in (DynamicLossScale(), ScheduledLossScale([1], [1.0]), FixedLossScale()):
        loss_scale.set_loss_scale(2.0**126)
        with pytest.raises(ValueError, match=r"at most 2\*\*125 "):
            cell_of(loss_scale, 2)


@quick_in_pynative_mode
def test_a_users_update_rule_goes_no_further(mode):
    cell = cell_of(Doubles(2.0**122), 3)
    scales = [float(call(cell)[2].asnumpy()) for _ in range(4 * 3)]
    assert scales[::3] == [2.0**122, 2.0**123, 2.0**124, 2.0**124]
