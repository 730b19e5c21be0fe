"""A ManualStep does, bit for bit, what a training cell does, and shows as much of it."""

import numpy as np
import pytest
from conftest import in_pairs, quick_in_pynative_mode, slow
from mindspore import ParameterTuple, Tensor
from support.manual_training import (
    CYCLE,
    Halve,
    batch,
    batches,
    dynamic,
    manual,
    training_cell,
)
from support.training import changed, of_both, state

from ms_lossscale import DynamicLossScale

# The loss scale, the number of networks, and the keywords. The configurations draw the others.
CONFIGURATIONS = {
    "cycle": (dynamic, 1, lambda: CYCLE),
    "transforms": (dynamic, 1, lambda: {"gradient_transforms": [Halve()]}),
    "two_scales": (lambda: [dynamic(), DynamicLossScale(2.0**8, scale_window=2)], 2, dict),
}


def check_the_same(step, cell):
    assert not changed(*of_both(cell, step))
    assert step.counters() == cell.counters()
    assert step.get_loss_scale() == cell.get_loss_scale()
    assert step.forward_state_names() == cell.forward_state_names()
    assert step.overflowed_parameters() == cell.overflowed_parameters()


@in_pairs
@pytest.mark.parametrize("name", ["cycle", *slow("two_scales", "transforms")])
def test_the_same_bits_as_a_training_cell(mode, name, how):
    make_scale, count, make_keywords = CONFIGURATIONS[name]
    cell = training_cell(make_scale(), count, **make_keywords())
    step, _, train_step = manual(make_scale(), how, count, **make_keywords())
    check_the_same(step, cell)
    for data in batches("...x....."):
        loss, overflow, _, *losses = cell(*data)
        its_losses, its_overflow = train_step(*data)
        assert its_overflow.shape == () and bool(its_overflow) == bool(overflow)
        expected = losses[0].asnumpy() if losses else [loss.asnumpy()]
        np.testing.assert_array_equal([each.asnumpy() for each in its_losses], expected)
        check_the_same(step, cell)
    assert cell.counters()["skipped_steps"] == 1
    step.flush()
    cell.flush()
    check_the_same(step, cell)
    if name == "cycle":
        # The last cycle had one call.
        assert cell.counters() == {"applied_steps": 4, "skipped_steps": 1, "consecutive_skipped_steps": 0}
        assert step.grad_norm() == cell.grad_norm()
        averages = {key: average.asnumpy() for key, average in step.ema_parameters().items()}
        assert not changed({key: average.asnumpy() for key, average in cell.ema_parameters().items()}, averages)


@quick_in_pynative_mode
def test_what_users_read_and_set(mode):
    step, (network,), train_step = manual(dynamic(), clip_norm=0.5, ema_decay=0.9)
    assert isinstance(step.parameters, ParameterTuple)
    assert list(map(id, step.parameters)) == list(map(id, network.trainable_params()))
    assert step.forward_state_names() == ["network_0.1.moving_mean", "network_0.1.moving_variance"]
    assert step.steps_made() == 0
    train_step(*batch(0))
    assert 0 < step.grad_norm() < np.inf
    norm = step.grad_norm()
    assert step.overflowed_parameters() == []
    train_step(*batch(1, overflows=True))
    assert not np.isfinite(step.grad_norm()) and norm != step.grad_norm()
    assert "network_0.0.weight" in step.overflowed_parameters()
    assert step.counters() == {"applied_steps": 1, "skipped_steps": 1, "consecutive_skipped_steps": 1}
    assert step.steps_made() == 2
    assert step.get_loss_scale() == step.loss_scale.get_loss_scale() == 2.0**9
    assert (step.scale_sense.asnumpy(), step.scale_sense.shape) == (2.0**9, ())
    step.set_loss_scale(2.0**12)
    assert step.get_loss_scale() == 2.0**12
    seen = []

    def forward(x, y):
        loss = network(x, y)
        seen.append((step.scale(loss), loss))
        return seen[-1]

    step.begin(*batch(2))
    scaled, loss = forward(*batch(2))
    assert float(scaled) == 2.0**12 * float(loss)
    step.end(tuple(map(zeros_like, step.parameters)))
    trained, averaged = state(network), step.ema_parameters()
    assert list(averaged) == [each.name for each in step.parameters]
    with step.ema_weights():
        for name, average in averaged.items():
            np.testing.assert_array_equal(state(network)[name], average.asnumpy())
    assert not changed(trained, state(network))


def zeros_like(weight):
    return Tensor(np.zeros(weight.shape, np.float32))


@quick_in_pynative_mode
def test_what_users_read_of_two(mode):
    step, networks, train_step = manual([dynamic(), 2.0**8], count=2, clip_norm=[None, 1.0])
    assert [list(map(id, each)) for each in step.parameters] == [
        list(map(id, each.trainable_params())) for each in networks
    ]
    assert all(isinstance(each, ParameterTuple) for each in step.parameters)
    train_step(*batch(0))
    first, second = step.grad_norm()
    assert first is None and second > 0
    assert step.get_loss_scale() == [2.0**10, 2.0**8]
    assert step.scale_sense.asnumpy().tolist() == [2.0**10, 2.0**8]
    step.set_loss_scale([2.0**9, 2.0**7])
    step.begin(*batch(1))
    assert [float(step.scale(Tensor(1.0), i)) for i in range(2)] == [2.0**9, 2.0**7]
    assert [each.get_loss_scale() for each in step.loss_scale] == [2.0**9, 2.0**7]


@quick_in_pynative_mode
def test_one_input_comes_back_as_it_is_and_several_as_a_tuple(mode):
    step, *_ = manual(dynamic())
    x, y = batch(0)
    np.testing.assert_array_equal(step.begin(x).asnumpy(), x.asnumpy())
    assert isinstance(step.begin(x, y), tuple)
    np.testing.assert_array_equal(step.begin(x, y)[1].asnumpy(), y.asnumpy())
    assert step.begin() == ()
