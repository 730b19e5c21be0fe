"""A scale that is set by hand within an accumulation cycle is the next cycle's, whatever its value is."""

import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import nn
from support.networks import Linear, batch_for
from support.retried_networks import Slope, inputs

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell

STEPS = 3
START = 2.0**10


def rule():
    # Moves after each cycle.
    return DynamicLossScale(START, scale_window=1)


def cell_of(loss_scale):
    network = Linear()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    return ScaledTrainOneStepCell(network, optimizer, loss_scale, gradient_accumulation_steps=STEPS).set_train()


def call(cell, overflow=False):
    return cell(*batch_for(overflow))[2].asnumpy().tolist()


def rest_of_the_cycle(cell, calls):
    return [call(cell) for _ in range(calls)]


@quick_in_graph_mode
def test_one_that_is_set_twice(mode):
    cell = cell_of(rule())
    call(cell)
    cell.set_loss_scale(2.0**5)
    call(cell)
    cell.set_loss_scale(START)
    assert rest_of_the_cycle(cell, 2) == [START] * 2
    assert rest_of_the_cycle(cell, 3) == [START, START, 2 * START]


@quick_in_graph_mode
def test_only_the_network_whose_scale_was_set_keeps_it(mode):
    networks = [Linear(), Linear()]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    optimizers = [nn.SGD(network.trainable_params(), learning_rate=0.01) for network in networks]
    cell = AlternatingTrainOneStepCell(networks, optimizers, rule(), gradient_accumulation_steps=STEPS).set_train()
    call(cell)
    cell.loss_scale[0].set_loss_scale(START)
    assert rest_of_the_cycle(cell, 3) == [[START] * 2, [START] * 2, [START, 2 * START]]


@quick_in_graph_mode
def test_two_cells_of_one_loss_scale(mode):
    loss_scale = rule()
    cells = [cell_of(loss_scale) for _ in range(2)]
    for cell in cells:
        call(cell)
    cells[0].set_loss_scale(START)
    for cell in cells:
        rest_of_the_cycle(cell, 2)
        assert cell.get_loss_scale() == START


@quick_in_graph_mode
@pytest.mark.parametrize("value", [*slow(2.0**10), 2.0**5], ids=["what the retry finds", "another"])
def test_a_retry_leaves_it_to_the_next_cycle(mode, value):
    network = Slope()
    cell = ScaledTrainOneStepCell(
        network,
        nn.SGD([network.weight], 0.01),
        DynamicLossScale(2.0**11, scale_window=1),
        gradient_accumulation_steps=STEPS,
        max_retries=1,
    ).set_train()
    small, large = inputs(1.0), inputs(63.0)
    cell(*small)
    cell.set_loss_scale(value)
    # Overflows in float16 at 2**11, and not at 2**10.
    scales = [float(cell(*each)[2]) for each in (large, small, small)]
    assert scales == [2.0**10, 2.0**10, value]
    assert cell.counters() == {"applied_steps": 1, "skipped_steps": 0, "consecutive_skipped_steps": 0, "retries": 1}
