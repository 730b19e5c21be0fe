"""Very large scales: gradients are right, or the scale is refused, also where gradients are accumulated."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor
from support.gan_networks import renamed
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


# A scale that is set within an accumulation cycle is the next one's: what the configurations do not draw of that.


def calls(cell, count):
    return [cell(*batch())[2].asnumpy().tolist() for _ in range(count)]


@quick_in_pynative_mode
def test_only_the_network_whose_scale_was_set_in_a_cycle_keeps_it(mode):
    networks, start = [renamed(f"{i}.", Linear()) for i in range(2)], 2.0**10
    scale, keywords = DynamicLossScale(start, scale_window=1), {"gradient_accumulation_steps": 3}
    cell = by_sgd(networks, scale, kind="alternating", **keywords)
    calls(cell, 1)
    cell.loss_scale[0].set_loss_scale(start)
    assert calls(cell, 3) == [[start] * 2, [start] * 2, [start, 2 * start]]


@quick_in_pynative_mode
def test_two_cells_of_one_loss_scale_that_is_set_in_their_cycles(mode):
    loss_scale = DynamicLossScale(2.0**10, scale_window=1)
    cells = [cell_of(loss_scale, 3) for _ in range(2)]
    for cell in cells:
        calls(cell, 1)
    cells[0].set_loss_scale(2.0**10)
    for cell in cells:
        calls(cell, 2)
        assert cell.get_loss_scale() == 2.0**10
