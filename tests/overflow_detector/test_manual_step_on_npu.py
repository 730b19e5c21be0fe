"""On the emulated NPU: a ManualStep clears the register at its beginning, and reads it after all backward passes."""

import mindspore
import numpy as np
import pytest
from conftest import in_pairs
from support.npu_networks import Saturating, saturating_batch
from support.training import by_sgd

from ms_lossscale import DynamicLossScale, emulation

register = emulation.register

pytestmark = pytest.mark.only_on("CPU", reason="an NPU is emulated on CPU only")


@in_pairs
def test_the_register_is_cleared_before_and_read_after_both_backwards(mode, how):
    mindspore.runtime.synchronize()
    with emulation.saturation_mode():
        networks = [Saturating("first"), Saturating("second", seed=1)]
        step = by_sgd(networks, DynamicLossScale(2.0**10), 0.1, "manual")
    first, second = (step.value_and_grad(network, i) for i, network in enumerate(networks))

    def train_step(x, y, other):
        x, y, other = step.begin(x, y, other)
        return step.end(first(x, y)[1], second(other, y)[1])

    train_step = mindspore.jit(train_step) if how == "in_jit" else train_step
    cases = [(False, False), (True, False), (False, False), (False, True), (False, False)]
    for seed, overflows in enumerate(cases):
        (x, y), (other, _) = (saturating_batch(its, seed) for its in overflows)
        weights = [network.weight.asnumpy().copy() for network in networks]
        # Other work has overflowed before the step.
        register.raise_status()
        register.events.clear()
        assert bool(train_step(x, y, other)) is any(overflows)
        moved = [bool((network.weight.asnumpy() != its).any()) for network, its in zip(networks, weights)]
        assert moved == [not any(overflows)] * 2
        begun, *computed, read, cleared = register.events
        assert (begun, read, cleared) == ("clear", f"get {int(any(overflows))}", "clear")
        assert set(computed) == {f"{way} {name}" for way in ("forward", "backward") for name in ("first", "second")}
    assert step.counters() == {"applied_steps": 3, "skipped_steps": 2, "consecutive_skipped_steps": 0}
    assert np.isfinite([network.weight.asnumpy() for network in networks]).all()
