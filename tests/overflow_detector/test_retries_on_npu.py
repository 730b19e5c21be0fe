"""Retries on the emulated NPU in saturation mode: the register is cleared before and read after each attempt."""

import mindspore
import numpy as np
import pytest
from conftest import MODES, slow
from mindspore import Tensor
from support.in_mode import in_mode
from support.npu_networks import OnNpu
from support.training import by_sgd

import ms_lossscale as ls

register = ls.emulation.register

pytestmark = pytest.mark.only_on("CPU", reason="an NPU is emulated on CPU only")

LEARNING_RATE = 2.0**-10


# What PyNative mode runs one after the other, a graph must be told to.
@pytest.fixture(params=["graph", pytest.param("pynative", marks=pytest.mark.slow)])
def mode(request):
    with in_mode(MODES[request.param]):
        yield request.param


@pytest.fixture(autouse=True)
def _on_npu():
    mindspore.runtime.synchronize()
    register.clear()
    with ls.emulation.saturation_mode():
        yield
    register.clear()


def tensors(*values):
    return [Tensor([value], mindspore.float32) for value in values]


def test_a_backward_that_saturates_is_tried_again_and_a_forward_overflows_in_each_try(mode):
    network = OnNpu("network")
    cell = by_sgd(network, ls.DynamicLossScale(2.0**15), LEARNING_RATE, max_retries=4)
    # 2**15 * 8 and two halves of it are beyond float16, 2**12 * 8 is not; once there, nothing is.
    for call in range(2):
        _, overflow, scale = cell(*tensors(2.0, 8.0))
        assert (bool(overflow.asnumpy()), float(scale.asnumpy())) == (False, 2.0**12)
        assert cell.counters()["retries"] == 3
        expected = 1.0 - (call + 1) * 16.0 * LEARNING_RATE
        np.testing.assert_array_equal(network.weight.asnumpy(), np.float32([expected]))
    _, overflow, scale = cell(*tensors(1e6, 1.0))
    assert (bool(overflow.asnumpy()), float(scale.asnumpy())) == (True, 2.0**8)
    assert cell.get_loss_scale() == 2.0**7
    assert cell.counters() == {"applied_steps": 2, "skipped_steps": 1, "consecutive_skipped_steps": 1, "retries": 7}


def of_two(kind, loss_scale, retries):
    keywords = {"network_inputs": [(0, 1), (2, 3)], "max_retries": retries}
    return by_sgd([OnNpu("first"), OnNpu("second")], loss_scale, LEARNING_RATE, kind, **keywords)


@pytest.mark.slow
def test_each_network_for_itself(mode):
    cell = of_two("alternating", ls.DynamicLossScale(2.0**12), 2)
    outputs = cell(*tensors(2.0, 1.0, 2.0, 32.0))
    assert outputs[1].asnumpy().tolist() == [False, False]
    assert outputs[2].asnumpy().tolist() == [2.0**12, 2.0**10]
    assert [counters["retries"] for counters in cell.counters()] == [0, 2]
    outputs = cell(*tensors(1e6, 1.0, 2.0, 1.0))
    assert outputs[1].asnumpy().tolist() == [True, False]
    # Each of its three attempts counts for the update rule.
    assert cell.get_loss_scale() == [2.0**9, 2.0**10]


@pytest.mark.slow
@pytest.mark.parametrize("retries", [*slow(0), 2])
def test_of_scales_of_their_own_all_go_down_since_the_register_does_not_tell_whose_it_was(mode, retries):
    scales = [ls.DynamicLossScale(2.0**12), ls.DynamicLossScale(2.0**11)]
    cell = of_two("simultaneous", scales, retries)
    # 2**11 * 64 and two halves of it are beyond float16 but for the last.
    _, overflow, scales, _ = cell(*tensors(2.0, 1.0, 2.0, 64.0))
    expected = (False, [2.0**10, 2.0**9]) if retries else (True, [2.0**12, 2.0**11])
    assert (bool(overflow.asnumpy()), scales.asnumpy().tolist()) == expected
    assert cell.get_loss_scale() == ([2.0**10, 2.0**9] if retries else [2.0**11, 2.0**10])
