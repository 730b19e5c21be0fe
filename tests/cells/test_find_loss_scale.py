"""`find_loss_scale`: that it finds what a step at each power of two shows, and changes nothing but the scale."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import dtype as mstype
from mindspore import nn, ops
from support.networks import weight
from support.npu_networks import INNOCENT, NAN, OnNpu, inputs_for
from support.retried_networks import LEARNING_RATE, Slope, SteepBackward, inputs
from support.training import by_sgd, changed, state

import ms_lossscale as ls

SCALE = "loss_scale.scale_value"


def scaled(loss_scale=None, network=None, **keywords):
    return by_sgd(network or Slope(), loss_scale or ls.DynamicLossScale(), LEARNING_RATE, **keywords)


def two(kind, loss_scales, **keywords):
    networks = [Slope("first"), Slope("second")]
    return by_sgd(networks, loss_scales, LEARNING_RATE, kind, network_inputs=[(0, 1), (0, 2)], **keywords)


def own(*scales):
    return [ls.DynamicLossScale(scale) for scale in scales]


def largest_clean(cell, batch, flush=False):
    """What really training at each power of two shows: for each loss scale the largest at which it is clean."""
    scales = np.atleast_1d(cell.get_loss_scale())
    found = [None] * len(scales)
    for exponent in range(24, -1, -1):
        cell.set_loss_scale(2.0**exponent)
        cell(*batch)
        if flush:
            cell.flush()
        moved = np.atleast_1d(cell.get_loss_scale()) < 2.0**exponent
        found = [best or (None if moved[i] else 2.0**exponent) for i, best in enumerate(found)]
    return found


KINDS = {
    "scaled": lambda: scaled(),
    "retries": lambda: scaled(max_retries=2),
    "accumulation": lambda: scaled(gradient_accumulation_steps=2),
    "own": lambda: two("simultaneous", own(2.0**16, 2.0**3)),
    "alternating": lambda: two("alternating", ls.DynamicLossScale(), every=(1, 2)),
}


@quick_in_graph_mode
@pytest.mark.parametrize("kind", ["accumulation", *slow("scaled", "retries", "own", "alternating")])
def test_it_is_half_of_the_largest_at_which_a_step_is_clean(mode, kind):
    """Nothing else has changed, and training goes on as if it had been set by hand, bit for bit: before the first step
    and between two, within a cycle, too; nothing is compiled anew."""
    found, by_hand = KINDS[kind](), KINDS[kind]()
    slopes = (5.0, 40.0)[: 1 if isinstance(found, ls.ScaledTrainOneStepCell) else 2]
    for seed in range(4):
        batch, before = inputs(*slopes, seed=seed), state(found)
        given = [tensor.asnumpy().copy() for tensor in batch]
        if seed != 1:
            scales = found.find_loss_scale(*batch)
            assert scales == found.get_loss_scale()
            by_hand.set_loss_scale(scales)
        assert all(name.endswith((SCALE, "accumulation.scale_is_set")) for name in changed(before, state(found)))
        for tensor, array in zip(batch, given):
            np.testing.assert_array_equal(tensor.asnumpy(), array)
        outputs = [cell(*batch) for cell in (found, by_hand)]
        for one, other in zip(*outputs):
            np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
        assert not changed(state(found), state(by_hand))
    assert len(found.compile_cache) == (mode == "graph")
    assert not outputs[0][1].asnumpy().any()
    # With `max_retries` no step falls that is tried again at a lower scale: the control has none.
    control = scaled() if kind == "retries" else by_hand
    if kind == "alternating":
        control.set_every([1, 1])
    expected = largest_clean(control, batch, flush=kind == "accumulation")
    assert np.atleast_1d(scales).tolist() == [best / 2 for best in expected]


@quick_in_graph_mode
@pytest.mark.parametrize("network", [None, *slow("alternating")])
def test_a_batch_that_no_scale_mends(mode, network):
    """Says so, and everything is as it was: also the scale of a network that would do."""
    cell = scaled() if network is None else two("alternating", ls.DynamicLossScale())
    batch = inputs(float("nan")) if network is None else inputs(1.0, float("nan"))
    which = "" if network is None else " of network 1"
    message = rf"found no loss scale{which}: this batch overflows at every power of two from 1 to 2\*\*24"
    before = state(cell)
    with pytest.raises(RuntimeError, match=message):
        cell.find_loss_scale(*batch)
    assert not changed(before, state(cell))


@quick_in_graph_mode
def test_a_floor_that_is_too_high_is_said(mode):
    """The gradient is 2**20 within the backward, so that the largest clean scale is 2**-5."""
    cell, batch = scaled(network=SteepBackward()), inputs(2.0**4)
    before = state(cell)
    with pytest.raises(RuntimeError, match=r"from 1 to 2\*\*24\. Let the scale fall further, .*min_loss_scale"):
        cell.find_loss_scale(*batch)
    assert not changed(before, state(cell))
    lower = scaled(ls.DynamicLossScale(min_loss_scale=2.0**-9), network=SteepBackward())
    assert lower.find_loss_scale(*batch) == 2.0**-6
    assert not lower(*batch)[1].asnumpy()


@quick_in_graph_mode
@pytest.mark.parametrize(
    ("floor", "ceiling", "found"),
    [
        (2.0**14 + 1, 2.0**15 - 1, 2.0**14 + 1),
        *slow((1.0, 2.0**10, 2.0**9), (2.0**15, 2.0**20, 2.0**15), (2.0**-3, 2.0**126, 2.0**14)),
        *slow((3.0, 2.0**15 + 1, 2.0**14)),
    ],
)
def test_between_the_floor_and_the_ceiling(mode, floor, ceiling, found):
    """Half of the ceiling, the floor itself, and bounds that are no powers of two, with none between them as well."""
    loss_scale = ls.DynamicLossScale(floor, min_loss_scale=floor, max_loss_scale=ceiling)
    assert scaled(loss_scale).find_loss_scale(*inputs(1.0)) == found


@pytest.mark.slow
def test_on_an_npu_each_network_has_its_own_largest(mode):  # A register does not show whose gradients overflowed.
    networks = [OnNpu("first"), OnNpu("second")]
    with ls.emulation.saturation_mode() as register:
        cell = by_sgd(networks, own(1.0, 1.0), 0.5, "simultaneous", network_inputs=[(0, 1), (2, 3)])
        # The gradient that flows into the register's cell is the scale times the second number.
        assert cell.find_loss_scale(*inputs_for((2.0, 1.0), (2.0, 2.0**6))) == [2.0**14, 2.0**8]
        assert not cell(*inputs_for((2.0, 1.0), (2.0, 2.0**6)))[1].asnumpy()
        before = state(cell)
        with pytest.raises(RuntimeError, match="found no loss scale of network"):
            cell.find_loss_scale(*inputs_for(NAN, INNOCENT))
        assert not register.raised
        assert not changed(before, state(cell))


@pytest.mark.slow
@quick_in_graph_mode
def test_an_error_of_the_network_leaves_the_scale(mode):
    cell = two("alternating", ls.DynamicLossScale())
    before = state(cell)
    with pytest.raises(ValueError, match="gives network 1 the input at position 2"):
        cell.find_loss_scale(*inputs(1.0))
    assert not changed(before, state(cell))
    assert cell.find_loss_scale(*inputs(1.0, 1.0)) == [2.0**14, 2.0**14]


class WithoutInputs(nn.Cell):
    """Its loss is float16, so that its gradient overflows at 65536."""

    def __init__(self):
        super().__init__()
        self.weight = weight(2, name="weight")

    def construct(self):
        return ops.square(self.weight).sum().astype(mstype.float16)


class WithNone(WithoutInputs):
    def construct(self, x):
        return ops.square(self.weight).sum().astype(mstype.float16)


@pytest.mark.parametrize("network, batch", [(WithoutInputs, ()), *slow((WithNone, (None,)))])
def test_of_a_network_without_inputs(mode, network, batch):
    cell = scaled(network=network())
    (wanted,) = largest_clean(scaled(network=network()), batch)
    before = state(cell)
    assert cell.find_loss_scale(*batch) == wanted / 2 == 2.0**14
    assert changed(before, state(cell)) == {SCALE}
    assert not bool(cell(*batch)[1])


@quick_in_graph_mode
def test_a_schedule_beside_it_goes_on_within_a_cycle(mode):
    scheduled = ls.ScheduledLossScale([1, 9], [4.0, 32.0])
    cell = two("alternating", [ls.DynamicLossScale(), scheduled], gradient_accumulation_steps=2)
    batch = inputs(1.0, 1.0)
    cell(*batch)
    cell.find_loss_scale(*batch)
    cell(*batch)
    assert scheduled.get_loss_scale() == 32
