"""A scale that is set within an accumulation cycle is the next one's: what the configurations do not draw of that."""

from conftest import quick_in_pynative_mode
from support.networks import Linear, batch
from support.training import by_sgd

from ms_lossscale import DynamicLossScale

STEPS, START = 3, 2.0**10


def rule():
    # Moves after each cycle.
    return DynamicLossScale(START, scale_window=1)


def calls(cell, count):
    return [cell(*batch())[2].asnumpy().tolist() for _ in range(count)]


@quick_in_pynative_mode
def test_only_the_network_whose_scale_was_set_keeps_it(mode):
    networks = [Linear(), Linear()]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    cell = by_sgd(networks, rule(), kind="alternating", gradient_accumulation_steps=STEPS)
    calls(cell, 1)
    cell.loss_scale[0].set_loss_scale(START)
    assert calls(cell, 3) == [[START] * 2, [START] * 2, [START, 2 * START]]


@quick_in_pynative_mode
def test_two_cells_of_one_loss_scale(mode):
    loss_scale, cells = rule(), []
    for _ in range(2):
        cells.append(by_sgd(Linear(), loss_scale, gradient_accumulation_steps=STEPS))
        calls(cells[-1], 1)
    cells[0].set_loss_scale(START)
    for cell in cells:
        calls(cell, 2)
        assert cell.get_loss_scale() == START
