"""AlternatingTrainOneStepCell: what networks that step one after the other have for themselves, and what they share."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import dtype as mstype
from mindspore import nn
from support import gan_networks as gan
from support.networks import Linear, batch_for
from support.training import OneForward, by_sgd, changed, same_bits, state

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale

# What each network takes of (x_0, y_0, x_1, y_1).
PAIRS = [(0, 1), (2, 3)]


@pytest.mark.parametrize("mode", ["graph", *slow("pynative")], indirect=True)
def test_a_gan_trains_as_in_two_stock_cells_one_after_the_other(mode):
    """Bit for bit, BatchNorm's statistics, too; where one network overflows, the stock cell's step is not made."""
    networks, stock = gan.generator_and_discriminator(), gan.generator_and_discriminator()
    optimizers, rule = gan.two_optimizers(*networks), DynamicLossScale(2.0**10, scale_window=2)
    cell = AlternatingTrainOneStepCell(gan.two_losses(*networks), optimizers, rule, network_inputs=gan.NETWORK_INPUTS)
    cell.set_train()
    stock_cells = [OneForward(*both).set_train() for both in zip(gan.two_losses(*stock), gan.two_optimizers(*stock))]
    for call, overflows in enumerate([(), (), (0,), (), (1,), (0, 1), (1,)]):
        inputs = gan.gan_batch(seed=call)
        losses = [
            None if i in overflows else its(*gan.take(gan.NETWORK_INPUTS[i], inputs)).asnumpy()
            for i, its in enumerate(stock_cells)
        ]
        outputs = cell(*gan.gan_batch(seed=call, overflow_in=overflows))
        f32 = mstype.float32
        assert [each.dtype for each in outputs] == [f32, mstype.bool_, f32, f32]
        assert [each.shape for each in outputs] == [(), (2,), (2,), (2,)]
        if not overflows:
            np.testing.assert_array_equal(outputs[3].asnumpy(), losses)
            np.testing.assert_allclose(outputs[0].asnumpy(), sum(losses), rtol=1e-6)
        held = state(cell)
        for i, its in enumerate(stock_cells):
            own = {each.name: each for each in its.network.get_parameters()}
            own.update({f"optimizer_{i}.{e.name}": e for e in its.optimizer.get_parameters() if e.name not in own})
            assert not {name for name, each in own.items() if not same_bits(held[name], each.asnumpy())}, call


def make(networks, loss_scale, **keywords):
    return by_sgd(networks, loss_scale, 0.1, "alternating", network_inputs=PAIRS, **keywords)


def linear_pair():
    return [gan.renamed(f"{i}.", Linear(seed=i)) for i in range(2)]


def pair_batch(call, overflow_in=()):
    return [tensor for i in range(2) for tensor in batch_for(i in overflow_in, seed=2 * call + i)]


@quick_in_pynative_mode
def test_one_loss_scale_is_copied_and_one_after_update_runs_after_the_update_of_each(mode):
    networks, unclipped, bound = linear_pair(), linear_pair(), 0.25
    loss_scale, clip = DynamicLossScale(2.0**10), gan.ClipWeights(networks[0].trainable_params(), bound)
    cell = make(networks, loss_scale, after_update=clip)
    before = state(cell)
    cell(*pair_batch(0, overflow_in=(0, 1)))
    assert not {name for name in changed(before, state(cell)) if name.endswith("weight")}
    cell(*pair_batch(1, overflow_in=(0,)))
    # It clips network 0, though only network 1 was updated.
    assert same_bits(networks[0].weight.asnumpy(), np.clip(before["0.weight"], -bound, bound))
    assert np.abs(before["0.weight"]).max() > bound
    optimizer = nn.SGD(unclipped[1].trainable_params(), learning_rate=0.1)
    nn.TrainOneStepCell(unclipped[1], optimizer).set_train()(*gan.take(PAIRS[1], pair_batch(1)))
    assert same_bits(networks[1].weight.asnumpy(), unclipped[1].weight.asnumpy())
    assert (cell.get_loss_scale(), loss_scale.get_loss_scale()) == ([256.0, 512.0], 1024.0)


@quick_in_pynative_mode
def test_a_network_without_aux_need_not_take_part_in_every_call(mode):
    networks = linear_pair()
    networks[1] = gan.WithAux(networks[1])
    cell = make(networks, DynamicLossScale(), has_aux=[False, True], max_retries=1)
    cell.set_every((2, 1))
    for call in range(2):
        inputs = pair_batch(call)
        auxes = cell(*inputs)[-1]
        assert auxes[0] == ()
        np.testing.assert_array_equal(auxes[1][0].asnumpy(), 2 * gan.take(PAIRS[1], inputs)[0].asnumpy())
    assert [counters["applied_steps"] for counters in cell.counters()] == [1, 2]


def test_discard_between_two_cycles_does_nothing(mode):
    cell = make(linear_pair(), DynamicLossScale(), gradient_accumulation_steps=2)
    for call in range(2):
        cell(*pair_batch(call, overflow_in=(0, 1)))
    before = state(cell)
    cell.discard()
    assert not changed(before, state(cell))
