"""Whether an overflow is seen, wherever it happens, and nothing else; and whether a step runs again if asked."""

import functools
import itertools

import mindspore
import numpy as np
from mindspore import Tensor, mutable

from ms_lossscale import FiniteGradients, FixedLossScale
from ms_lossscale.selfcheck.claim import check, expect, expect_equal
from ms_lossscale.selfcheck.networks import (
    BACKWARD_OVERFLOWS,
    FORWARD_OVERFLOWS,
    LOSS_SCALE,
    SIZE,
    cell_of_products,
    inputs,
)

PLACES = {"first": 0, "middle": 1, "last": 2}


# To compile it takes most of the time of the checks that share it.
@functools.lru_cache
def _cell(device):
    return cell_of_products(device, FixedLossScale(LOSS_SCALE))


def _at(place, value):
    """Inputs of which one has this value."""
    values = [1.0, 1.0, 1.0]
    values[place] = value
    return inputs(*values)


@check(quick=True)
def the_detector_sees_what_this_device_makes_of_an_overflow(device):
    """The detector chosen for this device and mode sees what becomes of 70000 in float16 here."""
    arithmetic, cell = device.arithmetic("70000"), _cell(device)
    out = arithmetic(Tensor(70000.0, mindspore.float32).reshape((1,)).astype(mindspore.float16))
    becomes_inf = bool(np.isinf(out.asnumpy()).all())
    is_finite_gradients = type(cell.overflow_detector) is FiniteGradients
    expect_equal(
        is_finite_gradients,
        becomes_inf,
        f"70000 in float16 becomes {out.asnumpy()[0]}, and the detector is {type(cell.overflow_detector).__name__}. "
        f"Whether gradients show it",
    )


@check(quick=True)
def an_overflow_in_the_forward_is_seen(device):
    """An overflow in the forward is seen, at each of three weights, of +, of - and of NaN."""
    cell = _cell(device)
    for (name, place), value in itertools.product(
        PLACES.items(), (FORWARD_OVERFLOWS, -FORWARD_OVERFLOWS, float("nan"))
    ):
        overflow = bool(cell(*_at(place, value))[1])
        expect(overflow, f"the product of the {name} weight with {value} in float16 did not count as an overflow")


@check(quick=True)
def an_overflow_in_the_backward_is_seen(device):
    """An overflow in the backward alone, where the loss is finite, is seen at each of three weights, of + and of -."""
    cell = _cell(device)
    for (name, place), value in itertools.product(PLACES.items(), (BACKWARD_OVERFLOWS, -BACKWARD_OVERFLOWS)):
        loss, overflow, _ = cell(*_at(place, value))
        expect(np.isfinite(loss.asnumpy()).all(), f"the loss is not finite but {loss}: the forward overflowed, too")
        expect(bool(overflow), f"a gradient of {value} times {LOSS_SCALE} at the {name} weight was not seen")
        if device.gradients_show_it:
            expect_equal(cell.overflowed_parameters(), [f"weight_{place}"], "the weights that are named")


@check(quick=True)
def finite_steps_are_not_flagged(device):
    """20 steps with random finite gradients are not taken for overflows, the first of them after one."""
    rng, cell = np.random.default_rng(0), _cell(device)
    expect(bool(cell(*_at(0, FORWARD_OVERFLOWS))[1]), "the overflow before was not seen")
    for step in range(20):
        overflow = bool(cell(*(Tensor(rng.uniform(-8, 8, SIZE).astype(np.float32)) for _ in PLACES))[1])
        expect(not overflow, f"step {step} of 20 was flagged, though all of its values are finite")


@check("gradients_show_it")
def large_finite_gradients_are_not_flagged(device):
    """Gradients whose sum is infinite in float32, but which are finite each, are no overflow."""
    gradients = (Tensor(np.full(2**15, 1e38, np.float32)), Tensor(np.full(SIZE, -1e38, np.float32)))
    expect(not bool(FiniteGradients()(mutable(gradients))), "finite gradients of 1e38 were taken for an overflow")


@check(quick=True)
def a_skipped_step_lowers_the_scale_at_once(device):
    """After an overflow the next step uses the lower loss scale."""
    cell = cell_of_products(device)
    scales = [float(cell(*_at(0, BACKWARD_OVERFLOWS))[2]) for _ in range(4)]
    expect_equal(scales, [LOSS_SCALE, LOSS_SCALE / 2, LOSS_SCALE / 4, LOSS_SCALE / 8], "the scales of four steps")


@check()
def a_retry_saves_the_batch(device):
    """A batch whose gradients overflow is tried again at half the scale until it does not, within the same call."""
    cell = cell_of_products(device, max_retries=8)
    # 100 * 2**9 is the first that float16 holds.
    _, overflow, scale = cell(*inputs(1.0, BACKWARD_OVERFLOWS, 1.0))
    expect(not bool(overflow), "the step was skipped, though it does not overflow at a scale of 512")
    expect_equal(float(scale), 512.0, "the scale that the step used at last")
    expect_equal(cell.counters()["retries"], 3, "the attempts beyond the first")


@check()
def what_no_scale_can_mend_is_skipped(device):
    """Where the loss itself is not finite no lower scale helps: the step is skipped, and the scale moves once."""
    cell = cell_of_products(device, max_retries=8)
    expect(bool(cell(*inputs(float("inf"), 1.0, 1.0))[1]), "a step with an infinite input was applied")
    expect_equal(cell.counters()["skipped_steps"], 1, "the steps that were skipped")
    if device.gradients_show_it:
        expect_equal(cell.counters()["retries"], 0, "the further attempts, where the loss is not finite")
    expect_equal(cell.get_loss_scale(), LOSS_SCALE / 2, "the scale after one skipped step")
