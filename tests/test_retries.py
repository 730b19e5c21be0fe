"""Retries against a simulation: which tries there are, what the law and the counters see, and that nothing is left."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.retried_networks import (
    LEARNING_RATE,
    Law,
    Penalised,
    RetryControl,
    Slope,
    TwoSlopes,
    inputs,
    loss_scale,
    random_slopes,
)
from support.training import changed, same_bits, state

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    FixedLossScale,
    OverflowDetector,
    ScaledTrainOneStepCell,
    ScheduledLossScale,
    SimultaneousTrainOneStepCell,
)

LAWS = {
    "plain": {"scale": 2.0**15, "window": 3},
    "hysteresis": {"scale": 2.0**15, "window": 4, "hysteresis": 2},
    "floor": {"scale": 2.0**12, "window": 5, "low": 2.0**9},
}


def sgd(network):
    return nn.SGD([network.weight], LEARNING_RATE)


def check(network, cell, control, counters):
    assert counters == control.counters()
    np.testing.assert_array_equal(network.weight.asnumpy(), np.full(3, control.weight, np.float32))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("retries", [1, 3])
@pytest.mark.parametrize("keywords", [{}, {"clip_norm": float("inf")}, {"gradient_accumulation_steps": 4}], ids=str)
def test_scaled(mode, law, retries, keywords):
    network = Slope()
    cell = ScaledTrainOneStepCell(
        network, sgd(network), loss_scale(**LAWS[law]), max_retries=retries, **keywords
    ).set_train()
    control = RetryControl(Law(**LAWS[law]), retries, keywords.get("gradient_accumulation_steps", 1))
    for seed, slope in enumerate(random_slopes(retries, 40)):
        overflow, scale = control.call(slope)
        outputs = cell(*inputs(slope, seed=seed))
        assert (bool(outputs[1].asnumpy()), float(outputs[2].asnumpy())) == (overflow, scale)
        assert cell.get_loss_scale() == control.law.scale
        check(network, cell, control, cell.counters())
        if not control.window:
            # A call that was tried again, or taken back, has run forward once, or never.
            assert int(network.calls.asnumpy()) == control.forwards
    assert min(control.retries, control.skipped_steps, control.applied_steps) > 0


@pytest.mark.parametrize("aux", [False, True])
def test_a_retried_step_is_the_step_at_the_lower_scale(mode, aux):
    """Bit for bit: weights, optimizer, BatchNorm, a user's own state, averages, losses and aux."""
    cells = []
    for scale in (2.0**15, 2.0**10):
        network = WithAux() if aux else Slope()
        optimizer = nn.Adam([network.weight], 0.01)
        law = DynamicLossScale(scale, scale_window=100)
        cells.append(
            ScaledTrainOneStepCell(
                network, optimizer, law, max_retries=8, ema_decay=0.5, clip_norm=1.0, has_aux=aux
            ).set_train()
        )
    for seed in range(3):
        outputs = [cell(*inputs(63.0, seed=seed)) for cell in cells]
        for one, other in zip(*map(flat, outputs)):
            assert same_bits(one, other)
    retried, plain = map(state, cells)
    assert changed(retried, plain) == {"step_counters.retries"}
    assert cells[0].counters()["retries"] == 5


class WithAux(Slope):
    def construct(self, x, slope):
        return super().construct(x, slope), (self.weight, {"x": x}), [slope, slope]


def flat(values):
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return [each for value in values for each in flat(value)]
    return [values.asnumpy()]


@pytest.mark.parametrize("form", ["list", "tuple"])
def test_simultaneous(mode, form):
    networks = [Slope("first"), Slope("second")]
    optimizers = list(map(sgd, networks))
    keywords = {"network_inputs": [(0, 1), (0, 2)]} if form == "list" else {}
    cell = SimultaneousTrainOneStepCell(
        networks if form == "list" else TwoSlopes(*networks),
        optimizers,
        loss_scale(**LAWS["plain"]),
        max_retries=2,
        **keywords,
    ).set_train()
    control = RetryControl(Law(**LAWS["plain"]), 2)
    weights = np.ones(2)
    for seed, (one, other) in enumerate(zip(random_slopes(3, 40), random_slopes(4, 40))):
        larger = np.nan if np.isnan(one + other) else max(one, other)
        overflow, scale = control.call(larger)
        outputs = cell(*inputs(one, other, seed=seed))
        assert (bool(outputs[1].asnumpy()), float(outputs[2].asnumpy())) == (overflow, scale)
        assert cell.counters() == control.counters()
        if not overflow:
            weights -= LEARNING_RATE * np.array([one, other])
        for network, weight in zip(networks, weights):
            np.testing.assert_array_equal(network.weight.asnumpy(), np.full(3, weight, np.float32))
            assert int(network.calls.asnumpy()) == control.applied_steps
    assert min(control.retries, control.skipped_steps, control.applied_steps) > 0


@pytest.mark.parametrize("every", [(1, 1), (1, 3)])
def test_alternating_each_for_itself(mode, every):
    networks = [Slope("first"), Slope("second")]
    cell = AlternatingTrainOneStepCell(
        networks,
        list(map(sgd, networks)),
        loss_scale(**LAWS["plain"]),
        max_retries=2,
        network_inputs=[(0, 1), (0, 2)],
        every=every,
    ).set_train()
    controls = [RetryControl(Law(**LAWS["plain"]), 2) for _ in networks]
    for call, pair in enumerate(zip(random_slopes(5, 40), random_slopes(6, 40)), 1):
        expected = [
            control.call(slope) if call % k == 0 else (False, control.law.scale)
            for control, slope, k in zip(controls, pair, every)
        ]
        x, *both = inputs(*pair, seed=call)
        outputs = cell(x, *both)
        assert list(zip(outputs[1].asnumpy(), outputs[2].asnumpy())) == expected
        for network, control, counters in zip(networks, controls, cell.counters()):
            check(network, cell, control, counters)
            assert int(network.calls.asnumpy()) == control.forwards
    assert min(control.retries for control in controls) > 0


def test_resumed_in_the_middle(mode):
    def make():
        network = Slope()
        return ScaledTrainOneStepCell(
            network, sgd(network), loss_scale(**LAWS["hysteresis"]), max_retries=2, gradient_accumulation_steps=2
        ).set_train()

    whole, first = make(), make()
    values = random_slopes(7, 11)
    for seed, slope in enumerate(values):
        whole(*inputs(slope, seed=seed))
    for seed, slope in enumerate(values[:5]):
        first(*inputs(slope, seed=seed))
    second = make()
    second.load_state_dict(first.parameters_dict())
    for seed, slope in enumerate(values[5:], 5):
        second(*inputs(slope, seed=seed))
    assert changed(state(whole), state(second)) == set()


class Recorded(OverflowDetector):
    """Counts how often it is started and asked, as an NPU's register is cleared and read."""

    def __init__(self):
        super().__init__()
        self.count = mindspore.Parameter(Tensor(np.zeros(2, np.int32)), name="detector.count", requires_grad=False)
        self.begun, self.asked = Tensor([1, 0], mindspore.int32), Tensor([0, 1], mindspore.int32)
        self.limit = Tensor(60.0, mindspore.float32)

    def start(self, values):
        return mindspore.ops.depend(values, mindspore.ops.assign_add(self.count, self.begun))

    def construct(self, grads):
        counted = mindspore.ops.depend(grads[0], mindspore.ops.assign_add(self.count, self.asked))
        return mindspore.ops.logical_not(mindspore.ops.isfinite(counted).all())


@pytest.mark.parametrize("steps", [1, 2])
def test_each_try_is_started_and_asked(mode, steps):
    network = Slope()
    cell = ScaledTrainOneStepCell(
        network,
        sgd(network),
        DynamicLossScale(2.0**15),
        max_retries=3,
        overflow_detector=Recorded(),
        gradient_accumulation_steps=steps,
    ).set_train()
    for seed in range(steps):
        cell(*inputs(8.0 if seed == 0 else 1.0, seed=seed))
    assert cell.counters()["retries"] == 3
    started, asked = cell.overflow_detector.count.asnumpy()
    # Of a window that ends, the sum is asked about as well.
    assert (started, asked) == (3 + steps, 3 + steps + (steps > 1))


@pytest.mark.parametrize(
    "given", [None, 128.0, FixedLossScale(8.0), FixedLossScale(8.0, False), ScheduledLossScale([2, 4], [8, 4])]
)
def test_a_scale_that_never_backs_off_is_refused(given):
    network = Slope()
    with pytest.raises(ValueError, match="'max_retries' must be 0 with a loss scale that never backs off"):
        ScaledTrainOneStepCell(network, sgd(network), given, max_retries=1)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_wrong_numbers(value, error):
    network = Slope()
    with pytest.raises(error, match="'max_retries' must be"):
        ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale(), max_retries=value)


def test_without_retries_there_are_three_counters():
    network = Slope()
    assert "retries" not in ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale()).counters()


@pytest.mark.parametrize("shares", [True, False])
def test_a_loss_that_the_scale_makes_infinite_is_tried_again(mode, shares):
    scale = DynamicLossScale(2.0**15)
    network = Penalised(scale if shares else 2.0**15)
    cell = ScaledTrainOneStepCell(network, sgd(network.inner), scale, max_retries=5).set_train()
    loss, overflow, used = cell(*inputs(1.0))
    if shares:
        assert np.isfinite(loss.asnumpy()) and not overflow.asnumpy()
        assert float(used.asnumpy()) == 2.0**11
        assert cell.counters() == {
            "applied_steps": 1,
            "skipped_steps": 0,
            "consecutive_skipped_steps": 0,
            "retries": 4,
        }
    else:
        assert overflow.asnumpy() and not np.isfinite(loss.asnumpy())
        assert cell.counters()["retries"] == 0


def test_an_input_gradient_of_a_scale_that_is_copied_is_refused():
    scale = DynamicLossScale()
    network = Penalised(scale)
    with pytest.raises(ValueError, match="'loss_scale' is copied for each network, so that the InputGradient"):
        AlternatingTrainOneStepCell([network], [sgd(network.inner)], scale)
    AlternatingTrainOneStepCell([network], [sgd(network.inner)], [scale])
