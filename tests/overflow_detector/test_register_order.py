"""
On the emulated NPU: the training cells read the device's one register at the right time, which nothing else can show.

FloatStatusRegister and the cells run unchanged; only the operators that read and clear the register are replaced.
"""

import functools

import mindspore
import pytest
from support import npu_networks as npu
from support.npu_networks import BACKWARD, BOTH, FORWARD, INNOCENT, NAN

from ms_lossscale import AlternatingTrainOneStepCell, SimultaneousTrainOneStepCell, emulation

register = emulation.register

pytestmark = [pytest.mark.slow, pytest.mark.only_on("CPU", reason="an NPU is emulated on CPU only")]


@functools.cache
def compiled(form, mode, count):
    """A training cell on the emulated NPU, whose network i takes the inputs 2 i and 2 i + 1, and its networks."""
    networks = npu.networks_on_npu(count)
    make = AlternatingTrainOneStepCell if form == "alternating" else SimultaneousTrainOneStepCell
    one, positions = networks, [(2 * i, 2 * i + 1) for i in range(count)]
    if form == "tuple":
        one, positions = npu.AllOnNpu(*networks), None
    with emulation.saturation_mode():
        cell = make(one, npu.optimizers_of(networks), npu.LOSS_SCALE, network_inputs=positions)
    return cell.set_train(), networks


def step(form, mode, *behaviours, stale=False):
    """One step from weights of 1. Returns what was found, the weights afterwards, and the events."""
    # What earlier tests began may still be running.
    mindspore.runtime.synchronize()
    cell, networks = compiled(form, mode, len(behaviours))
    npu.reset(networks)
    register.clear()
    register.events.clear()
    if stale:
        register.raise_status()
    outputs = [output.asnumpy() for output in cell(*npu.inputs_for(*behaviours))]
    return outputs[1].tolist(), npu.weights_of(networks), list(register.events)


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
@pytest.mark.parametrize("form", ["list", "tuple", "alternating"])
def test_found_overflows(mode, form, behaviours, stale):
    """Bits that unrelated work left in the register before the step ("stale") change nothing."""
    overflow, weights, _ = step(form, mode, *behaviours, stale=stale)
    overflowed = [behaviour != INNOCENT for behaviour in behaviours]
    if form != "alternating":
        assert overflow is any(overflowed)
        overflowed = [overflow] * 2
    else:
        assert overflow == overflowed
    assert weights == [1.0 if its else npu.updated(INNOCENT) for its in overflowed]


def assert_phase(events, names, status):
    """Asserts the order of one overflow check's events: clear, all computing, get, clear."""
    first, *computed, get, last = events
    assert (first, get, last) == ("clear", f"get {status}", "clear")
    assert set(computed) == {f"{direction} {name}" for name in names for direction in ("forward", "backward")}
    for name in names:
        assert computed.index(f"forward {name}") < computed.index(f"backward {name}")


@pytest.mark.parametrize("overflows", [False, True], ids=["clean", "overflow"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("form", ["list", "tuple", "alternating"])
def test_order(mode, form, count, overflows):
    behaviours = [INNOCENT] * (count - 1) + [BACKWARD if overflows else INNOCENT]
    _, _, events = step(form, mode, *behaviours)
    names = [f"network_{i}" for i in range(count)]
    if form == "alternating":
        assert len(events) == 5 * count
        for i, name in enumerate(names):
            assert_phase(events[5 * i : 5 * i + 5], [name], int(overflows and i == count - 1))
    else:
        assert_phase(events, names, int(overflows))
        # Once each. (With a tuple there is one backward for each loss.)
        assert len(events) == 3 + 2 * count or form == "tuple"
