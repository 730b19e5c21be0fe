"""What versions 0.1 to 0.3 saved between two cycles loads, and training goes on. Within one, it is refused."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import nightly, quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Parameter, Tensor
from support.checkpoints_of_releases import CELLS, RELEASES, train
from support.training import changed, same_bits, state

GOLDEN = Path(__file__).parents[1] / "golden"
SAVED = [(release, name) for release, names in RELEASES.items() for name in names]
QUICK = [("0_1", "scaled_adam"), ("0_1", "alternating")]
# What a step remembers within a cycle, or between two calls.
INNER = ("accumulation.", "forward_state.", "alternation.", "clipping.scale", "step_counters.overflowed")


@quick_in_graph_mode
@pytest.mark.parametrize("release, name", [*QUICK, *nightly(*(each for each in SAVED if each not in QUICK))])
def test_it_loads_strictly_and_training_goes_on(mode, release, name):
    values = dict(np.load(GOLDEN / f"checkpoints_{release}" / f"{name}.npz"))
    saved = {key: value for key, value in values.items() if not key.startswith("returned.")}
    cells = [CELLS[name]().set_train() for _ in range(2)]
    for cell in cells:
        cell.set_loss_scale(1.0)
    assert cells[0].load_state_dict({key: Tensor(value) for key, value in saved.items()}) == ([], [])
    mindspore.load_param_into_net(cells[1], {key: Parameter(Tensor(value), name=key) for key, value in saved.items()})
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
