"""The moving average of the weights: what moves it, where it is kept, and evaluation with it."""

import contextlib

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.linear_pair import Trained
from support.networks import HalfPrecision, Linear, batch, batch_for
from support.training import by_sgd, changed, same_bits, state

DECAY = 0.9


def averages(cell):
    return {name: average.asnumpy().copy() for name, average in cell.ema_parameters().items()}


def averaging(network, decay=DECAY, loss_scale=2.0**7):
    return by_sgd(network, loss_scale, ema_decay=decay)


@quick_in_graph_mode
@pytest.mark.parametrize("kind, steps", [("scaled", 1), *slow(("simultaneous", 2), ("alternating", 2))])
def test_evaluates_with_the_averages_and_trains_on_as_if_nothing_had_been(mode, kind, steps):
    evaluated, untouched = (Trained(kind, ema_decay=0.75, steps=steps) for _ in range(2))
    x, y = batch(100)
    for seed in range(9):
        overflows = (seed == 3, seed == 4)
        evaluated.call_cell(seed, overflows)
        untouched.call_cell(seed, overflows)
        before = state(evaluated.cell)
        if seed % 3 == 2:
            with evaluated.cell.ema_weights():
                loss = float(evaluated.networks[0](x, y).asnumpy())
                errors = x.asnumpy() @ averages(evaluated.cell)["first.weight"] - y.asnumpy()
                # Some ten roundings of 2**-24 = 6e-8.
                np.testing.assert_allclose(loss, np.mean(errors**2), rtol=1e-5)
                # Within another such context, too.
                for nested in (contextlib.nullcontext(), evaluated.cell.ema_weights(), contextlib.nullcontext()):
                    with nested:
                        for own in evaluated.weights:
                            assert same_bits(own.asnumpy(), averages(evaluated.cell)[own.name])
                with pytest.raises(RuntimeError, match="ema_weights"):
                    evaluated.call_cell(seed)
            assert changed(before, state(evaluated.cell)) == set()
        elif seed % 3 == 1:
            with pytest.raises(InterruptedError), evaluated.cell.ema_weights():
                raise InterruptedError
            assert changed(before, state(evaluated.cell)) == set()
        # The network itself computes with the trained weights again.
        assert same_bits(evaluated.networks[0](x, y).asnumpy(), untouched.networks[0](x, y).asnumpy())
    assert changed(state(evaluated.cell), state(untouched.cell)) == set()


@quick_in_pynative_mode
def test_what_a_checkpoint_has_of_the_weights_and_not_of_the_averages_they_begin_with(mode):
    network = Linear()
    cell = averaging(network)
    cell(*batch(0))
    before = state(cell)
    missing, _ = cell.load_state_dict({"loss_scale.scale_value": Tensor(4.0)}, strict=False)
    assert "ema.weight" in missing and changed(before, state(cell)) == {"loss_scale.scale_value"}
    cell.load_state_dict({"weight": Tensor(np.ones_like(before["weight"]))}, strict=False)
    assert changed(before, state(cell)) == {"loss_scale.scale_value", "weight", "ema.weight"}
    assert same_bits(state(cell)["ema.weight"], state(cell)["weight"])


@quick_in_pynative_mode
def test_float16_weights_have_float32_averages(mode):
    network = HalfPrecision()
    cell = averaging(network, 0.999)
    expected = network.weight.asnumpy().astype(np.float64)
    for step in range(6):
        cell(*batch(step))
        expected = 0.999 * expected + 0.001 * network.weight.asnumpy()
    average = averages(cell)["weight"]
    assert average.dtype == np.float32
    # Three float32 roundings of 2**-24 = 6e-8 a step. In float16, 2**-11 = 5e-4, the average would not move at all.
    np.testing.assert_allclose(average, expected, rtol=0, atol=2e-6)
    trained = network.weight.asnumpy().copy()
    with cell.ema_weights():
        assert network.weight.dtype == mstype.float16
        assert same_bits(network.weight.asnumpy(), average.astype(np.float16))
    assert same_bits(network.weight.asnumpy(), trained)


@quick_in_pynative_mode
def test_begins_with_the_weights_of_the_first_applied_step(mode):
    network = Linear()
    cell = averaging(network)
    start = np.full(network.weight.shape, 3.0, np.float32)
    ops.assign(network.weight, Tensor(start))
    assert same_bits(averages(cell)["weight"], start)
    with cell.ema_weights():
        assert same_bits(network.weight.asnumpy(), start)
    cell(*batch_for(True, 0))
    # As pretrained weights come, after construction.
    loaded = start + np.float32(1.0)
    ops.assign(network.weight, Tensor(loaded))
    expected = loaded.astype(np.float64)
    for step in range(3):
        cell(*batch(step))
        expected = DECAY * expected + (1 - DECAY) * network.weight.asnumpy()
        np.testing.assert_allclose(averages(cell)["weight"], expected, rtol=1e-6)


@quick_in_pynative_mode
def test_begins_with_weights_that_were_not_initialised_at_construction(mode):
    with nn.utils.no_init_parameters():
        network = nn.Dense(3, 1, has_bias=False)
    cell = averaging(nn.WithLossCell(network, nn.MSELoss()))
    loaded = np.ones((1, 3), np.float32)
    mindspore.load_param_into_net(network, {"weight": Parameter(Tensor(loaded), name="weight")})
    cell(*batch(0))
    expected = DECAY * loaded + (1 - DECAY) * network.weight.asnumpy().astype(np.float64)
    np.testing.assert_allclose(averages(cell)["weight"], expected, rtol=1e-6)
