"""
On the emulated NPU: the training cells read the device's one register at the right time, which nothing else can show.

FloatStatusRegister and the cells run unchanged; only the operators that read and clear the register are replaced.
"""

import functools

import mindspore
import pytest
from support.npu_networks import (
    BACKWARD,
    BOTH,
    FORWARD,
    INNOCENT,
    LOSS_SCALE,
    NAN,
    AllOnNpu,
    inputs_for,
    networks_on_npu,
    optimizers_of,
    reset,
    updated,
    weights_of,
)

from ms_lossscale import AlternatingTrainOneStepCell, SimultaneousTrainOneStepCell, emulation

register = emulation.register

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _clear_register():
    # What earlier tests began may still be running.
    mindspore.runtime.synchronize()
    register.clear()
    register.events.clear()


def make_cell(form, networks, **arguments):
    """A training cell on the emulated NPU. Network i takes the inputs 2 i and 2 i + 1."""
    with emulation.saturation_mode():
        if form == "tuple":
            return SimultaneousTrainOneStepCell(
                AllOnNpu(*networks), optimizers_of(networks), LOSS_SCALE, **arguments
            ).set_train()
        make = AlternatingTrainOneStepCell if form == "alternating" else SimultaneousTrainOneStepCell
        positions = [(2 * i, 2 * i + 1) for i in range(len(networks))]
        return make(networks, optimizers_of(networks), LOSS_SCALE, network_inputs=positions, **arguments).set_train()


@functools.cache
def compiled(form, mode, count):
    networks = networks_on_npu(count)
    return make_cell(form, networks), networks


def step(form, mode, *behaviours, stale=False):
    """One step from weights of 1. Returns what was found, the weights afterwards, and the events."""
    cell, networks = compiled(form, mode, len(behaviours))
    reset(networks)
    register.clear()
    register.events.clear()
    if stale:
        register.raise_status()
    outputs = [output.asnumpy() for output in cell(*inputs_for(*behaviours))]
    return outputs[1].tolist(), weights_of(networks), list(register.events)


CULPRITS = {
    "none": (INNOCENT, INNOCENT),
    "first": (BACKWARD, INNOCENT),
    "second": (INNOCENT, BACKWARD),
    "both": (BACKWARD, BACKWARD),
    "first_in_forward_only": (FORWARD, INNOCENT),
    "second_in_forward_only": (INNOCENT, FORWARD),
    "first_in_forward_and_backward": (BOTH, INNOCENT),
    "second_is_nan": (INNOCENT, NAN),
    "each_elsewhere": (FORWARD, BACKWARD),
}


@pytest.mark.parametrize("stale", [False, True], ids=["clear", "stale"])
@pytest.mark.parametrize("behaviours", CULPRITS.values(), ids=CULPRITS)
class TestFoundOverflows:
    """Bits that unrelated work left in the register before the step ("stale") change nothing."""

    @pytest.mark.parametrize("form", ["list", "tuple"])
    def test_simultaneous_skips_all_if_one_overflowed(self, mode, form, behaviours, stale):
        overflow, weights, _ = step(form, mode, *behaviours, stale=stale)
        if behaviours == (INNOCENT, INNOCENT):
            assert overflow is False
            assert weights == [updated(INNOCENT)] * 2
        else:
            assert overflow is True
            assert weights == [1.0, 1.0]

    def test_alternating_skips_the_one_that_overflowed(self, mode, behaviours, stale):
        overflow, weights, _ = step("alternating", mode, *behaviours, stale=stale)
        assert overflow == [behaviour != INNOCENT for behaviour in behaviours]
        assert weights == [updated(INNOCENT) if behaviour == INNOCENT else 1.0 for behaviour in behaviours]


def computing(*names):
    """The events of some networks' forward and backward."""
    return {f"{direction} {name}" for name in names for direction in ("forward", "backward")}


def assert_phase(events, names, status):
    """Asserts the order of one overflow check's events: clear, all computing, get, clear."""
    first, *computed, get, last = events
    assert first == "clear"
    assert set(computed) == computing(*names)
    for name in names:
        assert computed.index(f"forward {name}") < computed.index(f"backward {name}")
    assert get == f"get {status}"
    assert last == "clear"


@pytest.mark.parametrize("overflows", [False, True], ids=["clean", "overflow"])
class TestOrder:
    @pytest.mark.parametrize("form, count", [("list", 1), ("list", 2), ("list", 3), ("tuple", 2), ("tuple", 3)])
    def test_simultaneous_computes_everything_between_one_clear_and_one_get(self, mode, form, count, overflows):
        behaviours = [INNOCENT] * (count - 1) + [BACKWARD if overflows else INNOCENT]
        _, _, events = step(form, mode, *behaviours)
        assert_phase(events, [f"network_{i}" for i in range(count)], int(overflows))
        if form == "list":
            # Once each. (With a tuple there is one backward for each loss.)
            assert len(events) == 3 + 2 * count

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_alternating_does_so_in_each_phase(self, mode, count, overflows):
        behaviours = [INNOCENT] * (count - 1) + [BACKWARD if overflows else INNOCENT]
        _, _, events = step("alternating", mode, *behaviours)
        assert len(events) == 5 * count
        for i in range(count):
            is_culprit = overflows and i == count - 1
            assert_phase(events[5 * i : 5 * i + 5], [f"network_{i}"], int(is_culprit))
