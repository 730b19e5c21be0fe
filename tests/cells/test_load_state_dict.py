"""What `load_state_dict` writes and returns. The configurations train on from it."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from support.linear_pair import CELLS, Trained
from support.training import changed, state

from ms_lossscale import merge_shards


@pytest.mark.parametrize("kind", CELLS)
def test_names_that_do_not_fit(kind):
    cell = Trained(kind, clip_norm=1.0, ema_decay=0.5).cell
    before = state(cell)
    # One more of each number that may be any.
    loaded = {name: Tensor(its + np.float32(1) if its.dtype == np.float32 else its) for name, its in before.items()}
    taken = next(iter(loaded))
    loaded["stranger"] = loaded.pop(taken)
    with pytest.raises(RuntimeError, match=rf"{taken}\b.*stranger is unexpected.*Nothing was loaded"):
        cell.load_state_dict(loaded)
    assert not changed(before, state(cell))
    missing, unexpected = cell.load_state_dict(loaded, strict=False)
    assert (taken in missing, unexpected) == (True, ["stranger"])
    after = state(cell)
    for name in loaded.keys() - {"stranger"}:
        np.testing.assert_array_equal(after[name], loaded[name].asnumpy())


def test_a_value_of_another_dtype_is_cast():
    cell = Trained("scaled").cell
    cell.load_state_dict({"first.weight": Tensor([[0.5], [0.25], [1.0]], mindspore.float16)}, strict=False)
    assert state(cell)["first.weight"].ravel().tolist() == [0.5, 0.25, 1.0]
    assert state(cell)["first.weight"].dtype == np.float32


def test_scale_sense_shows_the_present_scale():
    cell = Trained("scaled").cell
    cell.set_loss_scale(8.0)
    assert (cell.scale_sense.shape, cell.scale_sense.dtype, float(cell.scale_sense)) == ((), mindspore.float32, 8.0)
    with pytest.raises(AttributeError):
        cell.scale_sense = Tensor(1.0)
    alternating = Trained("alternating").cell
    alternating.set_loss_scale([2.0, 4.0])
    assert alternating.scale_sense.asnumpy().tolist() == [2.0, 4.0]
    # What mindocr's callback reads.
    assert cell.loss_scaling_manager.get_loss_scale() == 8.0
    assert alternating.loss_scaling_manager.get_loss_scale() == [2.0, 4.0]


@pytest.mark.parametrize("kind", ["scaled", "alternating"])
def test_the_counters_are_found_by_their_old_name_with_a_warning(kind):
    cell = Trained(kind).cell
    with pytest.warns(FutureWarning, match=r"'step_counters' .* Call counters\(\)") as caught:
        counters = cell.step_counters
    assert [warning.filename for warning in caught] == [__file__]
    first = counters[0] if kind == "alternating" else counters
    assert any(first.applied_steps is parameter for parameter in cell.get_parameters())


def test_what_append_dict_adds_to_a_checkpoint():
    cell = Trained("scaled").cell
    cell.set_loss_scale(8.0)
    mindspore.save_checkpoint(cell, "saved.ckpt", append_dict={"note": "abc", "epoch": 3})
    loaded = mindspore.load_checkpoint("saved.ckpt")
    other = Trained("scaled").cell
    with pytest.raises(RuntimeError, match=r"epoch is unexpected\. Take out .* parameters\.pop\('epoch'\)") as refused:
        other.load_state_dict(loaded)
    assert "Construct" not in str(refused.value)
    assert other.load_state_dict(loaded, strict=False) == ([], ["epoch"])
    assert other.get_loss_scale() == 8.0
    del loaded["epoch"]
    assert other.load_state_dict(loaded) == ([], [])
    # The plain optimizer's checkpoint, as of one rank.
    assert set(merge_shards(["saved.ckpt"])) == {*state(cell), "epoch"}
