"""What versions 0.1 to 0.3 saved between two cycles: this version arrives there, too, and goes on from it."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import nightly, quick_in_graph_mode, slow
from mindspore import Parameter, Tensor
from support.checkpoints_of_releases import (
    CALLS,
    CASES,
    CASES_OF_0_1,
    CASES_OF_0_2,
    STEPS,
    build,
    finish,
    train,
    train_to_stop,
)
from support.training import same_bits, state

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = {"0.1": CASES_OF_0_1, "0.2": CASES_OF_0_2, "0.3": CASES}
SAVED = [(release, name) for release, names in RELEASES.items() for name in names]
QUICK = [("0.1", "scaled_adam"), ("0.1", "alternating")]
# In others, the update rule sees more overflows than it did: each try counts.
# And what alternating networks share is undone call by call since version 0.4.
ARRIVING = [
    each
    for each in SAVED
    if each[1] not in ("retried", "own_scales", "set_by_hand", "sharing") and each != ("0.3", "alternating")
]
# What a step remembers within a cycle, or between two calls; and in 0.1, statistics that a network only reaches went
# back with it, and the losses of turns that were skipped counted.
INNER = ("accumulation.", "forward_state.", "alternation.", "clipping.scale", "step_counters.overflowed")
OF_0_1_ALTERNATING = ("first.norm.moving", "returned.0", "returned.3")


def load(release, name):
    """Returns all Parameters, and the results of the last calls."""
    path = GOLDEN / f"checkpoints_{release.replace('.', '_')}" / f"{name}.npz"
    values = dict(np.load(path))
    returned = {key: value for key, value in values.items() if key.startswith("returned.")}
    return {key: value for key, value in values.items() if key not in returned}, returned


@quick_in_graph_mode
@pytest.mark.parametrize("release, name", [QUICK[0], *slow(*(each for each in ARRIVING if each != QUICK[0]))])
def test_training_arrives_where_it_did(mode, release, name):
    saved, returned = load(release, name)
    cell = build(name)
    train_to_stop(cell, name)
    finished = finish(cell, name)
    left_out = INNER + (OF_0_1_ALTERNATING if (release, name) == ("0.1", "alternating") else ())
    compared = [key for key in {**saved, **returned} if not any(part in key for part in left_out)]
    assert len(compared) > 12
    assert [key for key in compared if not same_bits(finished[key], {**saved, **returned}[key])] == []


@quick_in_graph_mode
@pytest.mark.parametrize("release, name", [*QUICK, *nightly(*(each for each in SAVED if each not in QUICK))])
def test_it_loads_strictly_and_training_goes_on(mode, release, name):
    saved, _ = load(release, name)
    cells = []
    for stock in (False, True):
        # From other weights and another scale: what is not loaded shows.
        cell = build(name, start=-3.0)
        cell.set_loss_scale(1.0)
        if stock:
            parameters = {key: Parameter(Tensor(value), name=key) for key, value in saved.items()}
            mindspore.load_param_into_net(cell, parameters)
        else:
            assert cell.load_state_dict({key: Tensor(value) for key, value in saved.items()}) == ([], [])
        held = state(cell)
        assert [
            key for key in saved if not any(part in key for part in INNER) and not same_bits(held[key], saved[key])
        ] == []
        cells.append(cell)
    first, second = (train(cell, name, CALLS - 2 * STEPS, CALLS) for cell in cells)
    assert [key for key in first if not same_bits(first[key], second[key])] == []
    moved = state(cells[0])
    assert not any(same_bits(moved[key], saved[key]) for key in saved if key.endswith("applied_steps"))
