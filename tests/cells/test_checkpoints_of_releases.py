"""What version 0.4 saved loads, and goes on as it did there. So does what 0.1 to 0.3 saved, but not within a cycle."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import nightly, quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor
from support.checkpoints_of_releases import CELLS, RELEASES, STEPS, train
from support.training import changed, same_bits, state

GOLDEN = Path(__file__).parents[1] / "golden"
SAVED = [(release, name) for release, names in RELEASES.items() for name in names]
QUICK = [("0_1", "scaled_adam"), ("0_1", "alternating")]
# What a step remembers within a cycle, or between two calls.
INNER = ("accumulation.", "forward_state.", "alternation.", "clipping.scale", "step_counters.overflowed")


def load_strictly(cell, values):
    assert cell.load_state_dict({name: Tensor(value) for name, value in values.items()}) == ([], [])


def load_with_mindspore(cell, values):
    mindspore.load_param_into_net(cell, {name: Parameter(Tensor(its), name=name) for name, its in values.items()})


@quick_in_pynative_mode
@pytest.mark.parametrize("load", [load_strictly, load_with_mindspore])
@pytest.mark.parametrize("name", ["sharing", *slow("scaled_adam", "own_scales", "retried", "simultaneous_tuple")])
def test_what_0_4_saved_goes_on_as_it_did(mode, name, load):
    """It was saved after a cycle, after one more call, and after the second cycle."""
    values = dict(np.load(GOLDEN / "checkpoints_0_4" / f"{name}.npz"))
    parts = ("between.", "within.", "ended.")
    saved = [{key[len(part) :]: its for key, its in values.items() if key.startswith(part)} for part in parts]
    for calls, begun in zip((STEPS, STEPS + 1), saved):
        cell = CELLS[name]().set_train()
        load(cell, begun)
        train(cell, calls)
        held = state(cell)
        assert saved[2].keys() - held.keys() <= {key for key in begun if key.endswith("step_counters.overflowed")}
        assert [key for key in held if key in saved[2] and not same_bits(held[key], saved[2][key])] == []


@quick_in_graph_mode
@pytest.mark.parametrize("release, name", [*QUICK, *nightly(*(each for each in SAVED if each not in QUICK))])
def test_it_loads_strictly_and_training_goes_on(mode, release, name):
    values = dict(np.load(GOLDEN / f"checkpoints_{release}" / f"{name}.npz"))
    saved = {key: value for key, value in values.items() if not key.startswith("returned.")}
    cells = [CELLS[name]().set_train() for _ in range(2)]
    for cell in cells:
        cell.set_loss_scale(1.0)
    load_strictly(cells[0], saved)
    load_with_mindspore(cells[1], saved)
    for held in map(state, cells):
        kept = [key for key in saved if not any(part in key for part in INNER)]
        assert len(kept) > 12
        assert [key for key in kept if not same_bits(held[key], saved[key])] == []
    assert all(map(same_bits, *map(train, cells)))
    moved = state(cells[0])
    assert not any(same_bits(moved[key], saved[key]) for key in saved if key.endswith("applied_steps"))


@quick_in_pynative_mode
@pytest.mark.parametrize("release, name", [QUICK[0], *nightly(*SAVED[1:])])
def test_what_was_saved_within_a_cycle_is_refused(mode, release, name):
    cell = CELLS[name]().set_train()
    before = state(cell)
    with pytest.raises(ValueError, match=r"version 0\.1 to 0\.3 saved 'parameters' "):
        cell.load_state_dict(mindspore.load_checkpoint(str(GOLDEN / f"checkpoints_{release}" / f"{name}.ckpt")))
    assert not changed(before, state(cell))
