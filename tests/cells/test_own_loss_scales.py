"""A loss scale for each network of a SimultaneousTrainOneStepCell, at its edges."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from support.retried_networks import LEARNING_RATE, Penalised, Slope, inputs

from ms_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    OverflowDetector,
    SimultaneousTrainOneStepCell,
)


def make(loss_scales=None, **keywords):
    networks = [Slope("first"), Slope("second")]
    if loss_scales is None:
        loss_scales = [DynamicLossScale(2.0**15), DynamicLossScale(2.0**13, hysteresis=2)]
    cell = SimultaneousTrainOneStepCell(
        networks,
        [nn.SGD([network.weight], LEARNING_RATE) for network in networks],
        loss_scales,
        network_inputs=[(0, 1), (0, 2)],
        **keywords,
    )
    return networks, cell.set_train()


@quick_in_pynative_mode
def test_reading_and_setting(mode):
    loss_scales = (DynamicLossScale(2.0**10), FixedLossScale(8.0))
    _, cell = make(loss_scales=loss_scales)
    assert all(one is other for one, other in zip(cell.loss_scale, loss_scales))
    assert cell.get_loss_scale() == [1024.0, 8.0]
    cell.set_loss_scale([16.0, 4.0])
    assert cell.scale_sense.asnumpy().tolist() == [16.0, 4.0]
    assert cell(*inputs(1.0, 1.0))[2].asnumpy().tolist() == [16.0, 4.0]
    cell.set_loss_scale(2.0)
    assert cell.get_loss_scale() == [2.0, 2.0]


def test_names():
    _, cell = make()
    names = [name for name in cell.parameters_dict() if "scale" in name]
    assert {f"network_{i}.loss_scale.scale_value" for i in range(2)} <= set(names)
    assert all(name.startswith(("network_0.loss_scale.", "network_1.loss_scale.")) for name in names)


class Told(OverflowDetector):
    """Sees an overflow where a gradient is larger than 60."""

    def __init__(self):
        super().__init__()
        self.limit = Tensor(60.0, mindspore.float32)

    def construct(self, grads):
        return ops.stack([(grad > self.limit).any() for grad in grads]).any()


@quick_in_pynative_mode
def test_where_a_detector_of_ones_own_tells_all_see_it(mode):
    _, cell = make(loss_scales=[DynamicLossScale(2.0**4), DynamicLossScale(2.0**3)], overflow_detector=Told())
    assert cell(*inputs(64.0, 1.0))[1].asnumpy()
    assert cell.get_loss_scale() == [2.0**3, 2.0**2]
    assert not cell(*inputs(1.0, 1.0))[1].asnumpy()
    # The detector does not see an infinite gradient as such, and it decides.
    cell.set_loss_scale(2.0**15)
    assert not cell(*inputs(1.0, -64.0))[1].asnumpy()


class WritesTooMuch(Slope):
    def construct(self, x, slope):
        ops.assign(self.norm.moving_mean, self.norm.moving_mean + x.sum(0))
        return (self.weight * slope).sum()


@quick_in_pynative_mode
@pytest.mark.parametrize("clip_norm", [1.0, *slow(None)])
@pytest.mark.parametrize(("first", "expected"), [(1.0, [8.0, 4.0]), (float("inf"), [8.0, 8.0])])
def test_what_the_forward_writes_is_seen_by_all_unless_gradients_tell_whose_it_was(mode, clip_norm, first, expected):
    networks = [WritesTooMuch("first"), Slope("second")]
    cell = SimultaneousTrainOneStepCell(
        networks,
        [nn.SGD([network.weight], LEARNING_RATE) for network in networks],
        [DynamicLossScale(2.0**4), DynamicLossScale(2.0**3)],
        network_inputs=[(0, 1), (2, 3)],
        clip_norm=clip_norm,
    ).set_train()
    x, slope, _ = inputs(1.0, 1.0)
    assert cell(x * float("inf"), Tensor(np.float32(first)), x, slope)[1].asnumpy()
    assert cell.get_loss_scale() == expected


class ManySlopes(nn.Cell):
    """The gradient of each of its weights is `slope`, in float16."""

    def __init__(self, count, name):
        super().__init__()
        self.weights = ParameterTuple(
            Parameter(Tensor(np.ones(3, np.float32)), name=f"{name}.weight{i}") for i in range(count)
        )

    def construct(self, slope):
        loss = slope * 0.0
        for weight in self.weights:
            loss += (weight.astype(mindspore.float16) * slope.astype(mindspore.float16)).astype(mindspore.float32).sum()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "keywords", "retries"),
    [
        ((5, 1, 6), {"clip_norm": 1e6}, 2),
        *slow(((5, 1, 6), {"gradient_accumulation_steps": 2}, 0), ((2,), {"gradient_accumulation_steps": 2}, 2)),
    ],
    ids=str,
)
@quick_in_graph_mode
def test_any_number_of_networks_with_any_number_of_weights(mode, counts, keywords, retries):
    networks = [ManySlopes(count, f"network{i}") for i, count in enumerate(counts)]
    steps = keywords.get("gradient_accumulation_steps", 1)
    cell = SimultaneousTrainOneStepCell(
        networks,
        [nn.SGD(list(network.weights), LEARNING_RATE) for network in networks],
        [DynamicLossScale(2.0**15) for _ in networks],
        network_inputs=[(i,) for i in range(len(counts))],
        max_retries=retries,
        **keywords,
    ).set_train()
    scales, weights = np.full(len(counts), 2.0**15), np.ones(len(counts))
    # No network overflows, then each in its turn; two retries are enough.
    for overflowed in range(-1, len(counts)):
        slopes = np.where(np.arange(len(counts)) == overflowed, 4.0, 1.0)
        overflows = overflowed >= 0
        is_lost = overflows and not retries
        if overflows and retries:
            scales[overflowed] /= 4
        for _ in range(steps):
            outputs = cell(*(Tensor(np.float32(slope)) for slope in slopes))
            assert (bool(outputs[1].asnumpy()), outputs[2].asnumpy().tolist()) == (is_lost, scales.tolist())
        if is_lost:
            scales[overflowed] /= 2
        else:
            weights -= LEARNING_RATE * slopes
        assert cell.get_loss_scale() == scales.tolist()
        for network, weight in zip(networks, weights):
            for each in network.weights:
                np.testing.assert_array_equal(each.asnumpy(), np.full(3, weight, np.float32))


@pytest.mark.slow
@quick_in_graph_mode
def test_nothing_is_tried_again_if_one_of_those_that_overflowed_is_at_its_floor(mode):
    _, cell = make([DynamicLossScale(2.0**15), DynamicLossScale(2.0**15, min_loss_scale=2.0**15)], max_retries=2)
    assert bool(cell(*inputs(4.0, 4.0))[1])
    assert cell.counters()["retries"] == 0
    assert not bool(cell(*inputs(4.0, 1.0))[1])
    assert cell.counters()["retries"] == 1


@pytest.mark.slow
@quick_in_pynative_mode
def test_an_input_gradient_of_one_of_the_scales(mode):
    loss_scales = [DynamicLossScale(2.0**15), DynamicLossScale(2.0**15)]
    networks = [Penalised(loss_scales[0], "first"), Slope("second")]
    cell = SimultaneousTrainOneStepCell(
        networks,
        [nn.SGD([network.weight], LEARNING_RATE) for network in (networks[0].inner, networks[1])],
        loss_scales,
        network_inputs=[(0, 1), (0, 2)],
        max_retries=5,
    ).set_train()
    _, overflow, scales, _ = cell(*inputs(1.0, 1.0))
    assert not overflow.asnumpy()
    assert scales.asnumpy().tolist() == [2.0**11, 2.0**15]
    retries = cell.counters()["retries"]
    # The loss of the network that holds none can't be mended.
    assert cell(*inputs(1.0, float("nan")))[1].asnumpy()
    assert cell.counters()["retries"] == retries == 4
