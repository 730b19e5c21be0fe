"""Gradient accumulation at its edges: a mean whose sum overflows, an NPU's register over the calls of a cycle."""

import mindspore
import numpy as np
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Tensor, nn
from support.npu_networks import Saturating, saturating_batch
from support.training import by_sgd, same_bits

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, emulation


@quick_in_pynative_mode
def test_a_mean_whose_sum_would_overflow(mode):
    # Their mean is a float32, and their sum is none.
    weight = mindspore.Parameter(Tensor([0.0]), name="weight")

    def given_gradient(gradient):
        return (weight * gradient).sum()

    cell = ScaledTrainOneStepCell(given_gradient, nn.SGD([weight], 1e-37), 1.0, gradient_accumulation_steps=3)
    # A Parameter that is in no Cell.
    assert "weight" in cell.parameters_dict()
    for gradient in (3e38, 2e38, 3e38):
        assert not bool(cell.set_train()(Tensor([gradient], mindspore.float32))[1])
    # Some six roundings of 2**-24 = 6e-8.
    np.testing.assert_allclose(weight.asnumpy(), [-80 / 3], rtol=1e-6)


@quick_in_graph_mode
def test_the_register_is_remembered_over_the_calls_of_a_cycle(mode):
    with emulation.saturation_mode() as register:
        network = Saturating("only")
        cell = by_sgd(network, DynamicLossScale(2.0**10), 0.1, gradient_accumulation_steps=3)

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
        # A cycle that is flushed after a call knows what the register said of that.
        for overflow, in_between in ((0, register.clear), (1, register.clear), (0, register.raise_status)):
            overflowed = bool(cell(*saturating_batch(overflow, overflow))[1])
            in_between()
            before = cell.counters()["skipped_steps"]
            cell.flush()
            assert overflowed == bool(overflow) == (cell.counters()["skipped_steps"] > before)
        # Once per cycle: three clean ones, four that overflowed, and those that were flushed.
        assert cell.counters() == {"applied_steps": 5, "skipped_steps": 5, "consecutive_skipped_steps": 0}
        assert cell.get_loss_scale() == 2.0**5


@quick_in_graph_mode
def test_the_register_shows_nobody_elses_over_a_cycle(mode):
    with emulation.saturation_mode() as register:
        networks = [Saturating("first"), Saturating("second", seed=1)]
        keywords = {"network_inputs": [(0, 2), (1, 2)], "gradient_accumulation_steps": 2}
        cell = by_sgd(networks, DynamicLossScale(2.0**10), 0.1, "alternating", **keywords)
        cycles = [
            # For each call what overflows in each network; what the cycle's calls say.
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
