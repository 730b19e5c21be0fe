"""What a ManualStep shows and takes. The configurations compare its steps with the reference."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import ParameterTuple, Tensor, ops
from support.manual_training import batch, dynamic, manual
from support.training import changed, state


@quick_in_pynative_mode
def test_what_users_read_and_set(mode):
    step, (network,), train_step = manual(dynamic(), clip_norm=0.5, ema_decay=0.9)
    assert isinstance(step.parameters, ParameterTuple)
    assert list(map(id, step.parameters)) == list(map(id, network.trainable_params()))
    assert step.forward_state_names() == ["network_0.1.moving_mean", "network_0.1.moving_variance"]
    assert step.steps_made() == 0
    train_step(*batch(0))
    assert step.overflowed_parameters() == []
    train_step(*batch(1, overflows=True))
    assert "network_0.0.weight" in step.overflowed_parameters()
    assert step.steps_made() == 2
    assert step.loss_scale.get_loss_scale() == 2.0**9
    assert (step.scale_sense.asnumpy(), step.scale_sense.shape) == (2.0**9, ())
    step.set_loss_scale(2.0**12)
    x, y = batch(2)
    np.testing.assert_array_equal(step.begin(x).asnumpy(), x.asnumpy())
    assert step.begin() == ()
    begun = step.begin(x, y)
    assert isinstance(begun, tuple)
    np.testing.assert_array_equal(begun[1].asnumpy(), y.asnumpy())
    loss = network(*begun)
    assert float(step.scale(loss)) == 2.0**12 * float(loss)
    step.end(tuple(Tensor(np.zeros(weight.shape, np.float32)) for weight in step.parameters))
    trained, averaged = state(network), step.ema_parameters()
    assert list(averaged) == [each.name for each in step.parameters]
    with step.ema_weights():
        for name, average in averaged.items():
            np.testing.assert_array_equal(state(network)[name], average.asnumpy())
    assert not changed(trained, state(network))


NUMBERS = (4, 4.0, np.int64(4), np.int32(4), np.uint8(4), np.float16(4), np.float32(4), np.float64(4), np.ones(4).sum())


@quick_in_pynative_mode
def test_a_weight_and_a_number_may_be_numpys(mode):
    step, networks, _ = manual([2.0**8, 2.0**4], count=2)
    value_and_grad = step.value_and_grad(networks[1], np.int64(1))
    for weight in NUMBERS:
        x, y = step.begin(*batch(0))
        before = state(networks[1])
        grads = value_and_grad(x, y)[1]
        assert [float(step.scale(Tensor(1.0), i)) for i in (np.int64(0), np.uint8(1))] == [2.0**8, 2.0**4]
        assert not step.end(tuple(map(ops.zeros_like, step.parameters[0])), grads, weight=weight)
        assert changed(before, state(networks[1]))
    for weight, error in ((np.float32("nan"), ValueError), (np.int64(-1), ValueError), (np.bool_(True), TypeError)):
        step.begin(*batch(0))
        with pytest.raises(error, match="weight must be a"):
            step.end(grads, grads, weight=weight)
    with pytest.raises(ValueError, match="the number of an optimizer must be from 0 to 1, but got 2"):
        step.value_and_grad(networks[1], np.int64(2))
