"""What `load_state_dict` refuses, and what it writes. Training goes on from it in test_checkpoints_of_releases.py."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor
from support.checkpoints_of_releases import CASES, STEPS, build
from support.linear_pair import CELLS, Trained
from support.training import changed, same_bits, state

LENGTHS = ("accumulation.steps", "alternation.steps")


def small(name):
    return {key: Tensor(value) for key, value in state(build(name)).items()}


@pytest.mark.parametrize("name", CASES)
def test_names_that_do_not_fit(name):
    cell = build(name)
    before = state(cell)
    # A call of a cycle.
    expected = {key: value + (STEPS if key.endswith(LENGTHS) else 1) for key, value in before.items()}
    parameters = {key: Parameter(Tensor(expected[key]), name=key) for key in before if before[key].dtype != bool}
    # What earlier versions did not tell is filled in.
    told = ("wrote_shared", "scale_is_set")
    missing = sorted(key for key in set(before) - set(parameters) if not key.endswith(told))
    taken = next(iter(parameters))
    parameters["stranger"] = parameters.pop(taken)
    with pytest.raises(RuntimeError, match=r"missing and stranger is unexpected.*Nothing was loaded"):
        cell.load_state_dict(parameters)
    assert all(same_bits(value, state(cell)[key]) for key, value in before.items())
    missing_keys, unexpected_keys = cell.load_state_dict(parameters, strict=False)
    assert sorted(missing_keys) == sorted([*missing, taken])
    assert unexpected_keys == ["stranger"]
    loaded = state(cell)
    for key in parameters:
        if key != "stranger":
            np.testing.assert_array_equal(loaded[key], expected[key])


def test_losses_of_turns_that_may_still_be_skipped():
    # A cycle of one call that does not tell of how many is of 0.1 or 0.2, which saved such losses.
    cell = build("alternating")
    values = {"alternation.calls": Tensor(1, mindspore.int32), "alternation.last_losses": Tensor([2.0, 3.0])}
    cell.load_state_dict({**values, "alternation.window_every": Tensor([1, 2], mindspore.int32)}, strict=False)
    # The second one waits.
    assert state(cell)["alternation.last_losses"].tolist() == [0.0, 3.0]
    cell.load_state_dict({**values, "alternation.steps": Tensor(STEPS, mindspore.int32)}, strict=False)
    assert state(cell)["alternation.last_losses"].tolist() == [2.0, 3.0]


def test_a_part_of_a_checkpoint_leaves_the_copies_of_the_cycle_that_has_begun():
    cell = build("retried")
    before = state(cell)
    cell.load_state_dict({"first.seen": Tensor([7.0, 8.0])}, strict=False)
    assert changed(before, state(cell)) == {"first.seen"}


@pytest.mark.parametrize("kind", [CELLS[0], *slow(*CELLS[1:])])
def test_a_cycle_that_was_begun_with_another_number_of_calls(kind):
    begun = Trained(kind, steps=3)
    begun.call(0)
    within = {name: Tensor(value) for name, value in state(begun.cell).items()}
    begun.flush()
    between = {name: Tensor(value) for name, value in state(begun.cell).items()}
    assert [name for name in between if name.endswith(LENGTHS) and int(between[name]) != 0] == []
    for steps in (1, 2):
        cell = Trained(kind, steps=steps).cell
        cell.set_loss_scale(1.0)
        before = state(cell)
        for strict in (True, False):
            match = f"'gradient_accumulation_steps' must be 3, but got {steps}: .*Nothing was loaded"
            with pytest.raises(ValueError, match=match):
                cell.load_state_dict(within, strict)
        assert changed(before, state(cell)) == set()
        assert cell.load_state_dict(between, strict=False)[0] == []
        assert cell.steps_made() == 1
    assert Trained(kind, steps=3).cell.load_state_dict(within) == ([], [])


def test_cycles_that_are_longer_than_can_be_told():
    few, many = (Trained("scaled", steps=steps).cell for steps in (3, 2**15))
    within = {name: Tensor(value) for name, value in state(many).items()}
    # After five calls.
    within["accumulation.micro_steps"] = Tensor(-(2**31) + 5, mindspore.int32)
    with pytest.raises(ValueError, match="must be more than 32767, but got 3"):
        few.load_state_dict(within)
    assert many.load_state_dict(within) == ([], [])
    assert state(many)["accumulation.micro_steps"] == 5
    saved = {name: Tensor(value) for name, value in state(many).items()}
    with pytest.raises(ValueError, match="must be 32768, but got 3"):
        few.load_state_dict(saved)
    assert many.load_state_dict(saved) == ([], [])
    # What is not told, as in checkpoints of 0.1: two calls of some number.
    within["accumulation.micro_steps"] = Tensor(2, mindspore.int32)
    assert few.load_state_dict(within) == many.load_state_dict(within) == ([], [])
    with pytest.raises(ValueError, match="must be more than 1, but got 1"):
        Trained("scaled").cell.load_state_dict(within)


def test_a_value_of_another_dtype_is_cast():
    cell = build("scaled_momentum")
    parameters = small("scaled_momentum")
    parameters["first.weight"] = Tensor([0.5, 0.25], mindspore.float16)
    cell.load_state_dict(parameters)
    assert state(cell)["first.weight"].tolist() == [0.5, 0.25]
    assert state(cell)["first.weight"].dtype == np.float32


def test_a_norm_of_an_earlier_version_was_held_times_the_scale():
    cell = Trained("scaled", clip_norm=1.0).cell
    norm = {"clipping.root": Tensor(24.0), "clipping.power": Tensor(2.0), "clipping.scale": Tensor(8.0)}
    assert cell.load_state_dict(norm, strict=False)[1] == []
    assert cell.grad_norm() == 1.5


def test_scale_sense_shows_the_present_scale():
    cell = build("scaled_momentum")
    cell.set_loss_scale(8.0)
    assert (cell.scale_sense.shape, cell.scale_sense.dtype, float(cell.scale_sense)) == ((), mindspore.float32, 8.0)
    with pytest.raises(AttributeError):
        cell.scale_sense = Tensor(1.0)
    alternating = build("alternating")
    alternating.set_loss_scale([2.0, 4.0])
    assert alternating.scale_sense.asnumpy().tolist() == [2.0, 4.0]
    # What mindocr's callback reads.
    assert cell.loss_scaling_manager.get_loss_scale() == 8.0
    assert alternating.loss_scaling_manager.get_loss_scale() == [2.0, 4.0]
