"""Gradient accumulation: N calls are one step, or none; and nothing else in between."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from support.linear_pair import CELLS, Trained
from support.networks import BATCH, FEATURES, HalfPrecision, Normalised, batch, batch_for, weight
from support.training import same_bits, state

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell, emulation

CYCLES, STEPS = 4, 3


def data():
    """The inputs and targets of all cycles, one after the other."""
    rng = np.random.default_rng(0)
    rows = CYCLES * STEPS * BATCH
    return rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.normal(size=(rows, 1)).astype(np.float32)


def batches(size):
    """All data in batches."""
    x, y = data()
    return [(Tensor(x[i : i + size]), Tensor(y[i : i + size])) for i in range(0, len(x), size)]


@quick_in_pynative_mode
def test_a_mean_whose_sum_would_overflow(mode):
    # Their mean is a float32, and their sum is none.
    network = GivenGradient()
    cell = ScaledTrainOneStepCell(
        network, nn.SGD(network.trainable_params(), 1e-37), 1.0, gradient_accumulation_steps=3
    ).set_train()
    overflows = [bool(cell(Tensor(np.float32([gradient])))[1]) for gradient in (3e38, 2e38, 3e38)]
    assert overflows == [False, False, False]
    # Some six roundings of 2**-24 = 6e-8.
    np.testing.assert_allclose(network.weight.asnumpy(), [-80 / 3], rtol=1e-6)


class GivenGradient(nn.Cell):
    """Its weight's gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = mindspore.Parameter(Tensor(np.zeros(1, np.float32)), name="weight")

    def construct(self, gradient):
        return (self.weight * gradient).sum()


@quick_in_graph_mode
def test_statistics_of_an_overflowing_cycle_are_undone(mode):
    network = Normalised()
    cell = ScaledTrainOneStepCell(
        network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(), gradient_accumulation_steps=3
    ).set_train()
    statistics = (network.norm.moving_mean, network.norm.moving_variance)

    def cycle(overflows, seed):
        before = [parameter.asnumpy().copy() for parameter in statistics]
        for call, overflow in enumerate(overflows):
            cell(*batch_for(overflow, seed + call))
            # The calls after it do not see what an overflow wrote.
            assert all(np.isfinite(parameter.asnumpy()).all() for parameter in statistics)
        return before, [parameter.asnumpy().copy() for parameter in statistics]

    for clean in range(2):
        before, after = cycle((0, 0, 0), 10 * clean)
        assert not any(same_bits(*pair) for pair in zip(before, after))
    before, after = cycle((0, 1, 0), 30)
    assert all(same_bits(*pair) for pair in zip(before, after))
    before, after = cycle((0, 0, 0), 40)
    assert not any(same_bits(*pair) for pair in zip(before, after))


class Saturating(nn.Cell):
    """A linear model that computes as an NPU in saturation mode does: no tensor shows an overflow."""

    def __init__(self, name, seed=0):
        super().__init__(auto_prefix=False)
        self.weight = weight(FEATURES, 1, seed=seed, name=f"{name}.weight")
        self.saturate = emulation.Saturate(name)

    def construct(self, x, y):
        return ops.square(self.saturate(ops.matmul(x, self.weight)) - y).mean()


def saturating_batch(overflow, seed):
    """A batch whose products leave the range of float16, and whose saturated gradients are finite."""
    x, y = batch(seed)
    if overflow:
        x = Tensor(x.asnumpy() * np.float32(1e8))
    return x, y


@quick_in_graph_mode
def test_the_register_is_remembered_over_the_calls_of_a_cycle(mode):
    with emulation.saturation_mode() as register:
        network = Saturating("only")
        cell = ScaledTrainOneStepCell(
            network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(2.0**10), gradient_accumulation_steps=3
        ).set_train()

        def read_by_somebody_else():
            register.read()

        cycles = [
            # What overflows, what happens on the device between the calls, and what the calls say.
            ((0, 0, 0), register.clear, [False, False, False]),
            ((1, 0, 0), register.clear, [True, True, True]),
            ((0, 1, 0), read_by_somebody_else, [False, True, True]),
            ((0, 0, 1), register.clear, [False, False, True]),
            ((0, 0, 0), register.raise_status, [False, False, False]),
            ((1, 0, 0), register.raise_status, [True, True, True]),
            ((0, 0, 0), read_by_somebody_else, [False, False, False]),
        ]
        for cycle, (overflows, in_between, expected) in enumerate(cycles):
            before = network.weight.asnumpy().copy()
            said = []
            for call, overflow in enumerate(overflows):
                in_between()
                said.append(bool(cell(*saturating_batch(overflow, 3 * cycle + call))[1]))
            assert said == expected, cycle
            assert same_bits(before, network.weight.asnumpy()) == expected[-1]
            assert np.isfinite(network.weight.asnumpy()).all()
        # Once per cycle: three clean ones, four that overflowed.
        assert cell.counters() == {"applied_steps": 3, "skipped_steps": 4, "consecutive_skipped_steps": 0}
        assert cell.get_loss_scale() == 2.0**6


@quick_in_graph_mode
def test_the_register_shows_nobody_elses_over_a_cycle(mode):
    with emulation.saturation_mode() as register:
        networks = [Saturating("first"), Saturating("second", seed=1)]
        cell = AlternatingTrainOneStepCell(
            networks,
            [nn.SGD(network.trainable_params(), 0.1) for network in networks],
            DynamicLossScale(2.0**10),
            network_inputs=[(0, 2), (1, 2)],
            gradient_accumulation_steps=2,
        ).set_train()
        cycles = [
            # For each call what overflows in each network; what the cycle's calls say.
            (((0, 0), (0, 0)), [[False, False], [False, False]]),
            (((1, 0), (0, 0)), [[True, False], [True, False]]),
            (((0, 1), (0, 0)), [[False, True], [False, True]]),
            (((0, 0), (1, 0)), [[False, False], [True, False]]),
            (((0, 0), (0, 1)), [[False, False], [False, True]]),
            (((1, 0), (0, 1)), [[True, False], [True, True]]),
            (((0, 0), (0, 0)), [[False, False], [False, False]]),
        ]
        for cycle, (calls, expected) in enumerate(cycles):
            said = []
            for call, overflows in enumerate(calls):
                register.raise_status()
                seed = 2 * cycle + call
                (x0, y), (x1, _) = (saturating_batch(overflow, seed) for overflow in overflows)
                said.append(cell(x0, x1, y)[1].asnumpy().tolist())
            assert said == expected, cycle
        assert [counters["skipped_steps"] for counters in cell.counters()] == [3, 3]


# Of so many calls the number that is kept has no place but in its sign.
@quick_in_pynative_mode
@pytest.mark.parametrize("steps", [*slow(3), 2**15])
def test_a_flush_ends_a_cycle_that_has_begun_and_nothing_else(mode, steps):
    trained = Trained("scaled", steps=steps)
    trained.cell.flush()
    trained.call()
    trained.flush()
    trained.cell.flush()
    assert trained.cell.counters() == {"applied_steps": 1, "skipped_steps": 0, "consecutive_skipped_steps": 0}


@pytest.mark.parametrize("kind", CELLS)
def test_memory_is_one_float32_buffer_for_each_weight(kind):
    without, with_accumulation = (state(Trained(kind, steps=steps).cell) for steps in (1, 4))
    added = [with_accumulation[name] for name in with_accumulation.keys() - without.keys()]
    weights_of = 1 if kind == "scaled" else 2
    tensors = [value for value in added if value.ndim]
    assert [(value.shape, value.dtype) for value in tensors] == [((FEATURES, 1), np.float32)] * weights_of
    # What is left are scalars: how far the cycle is, what it knows, its scale.
    assert all(value.size == 1 for value in added if not value.ndim)


@quick_in_pynative_mode
def test_float16_weights_are_accumulated_in_float32(mode):
    network = HalfPrecision()
    cell = ScaledTrainOneStepCell(
        network, nn.SGD(network.trainable_params(), 0.1), 2.0**7, gradient_accumulation_steps=2
    ).set_train()
    assert state(cell)["accumulation.weight"].dtype == np.float32
    start = network.weight.asnumpy().astype(np.float64)
    gradients = []
    for seed in range(2):
        x, y = batch(seed)
        cell(x, y)
        x, y = (tensor.asnumpy().astype(np.float64) for tensor in (x, y))
        gradients.append(2 / BATCH * x.T @ (x @ start - y))
    # Float16 rounds to 2**-11 = 5e-4; the errors and products of each gradient and the update are rounded so.
    np.testing.assert_allclose(network.weight.asnumpy(), start - 0.1 * np.mean(gradients, axis=0), rtol=0, atol=5e-3)
