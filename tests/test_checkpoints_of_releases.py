"""Checkpoints that earlier versions wrote in the middle of a cycle, with everything on, resume bit for bit."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from support.checkpoints_of_releases import CASES, CASES_OF_0_1, STEPS, STOP, build, finish, train
from support.training import same_bits

pytestmark = pytest.mark.long

GOLDEN = Path(__file__).parent / "golden"


def load(name):
    folder = GOLDEN / ("checkpoints_0_1" if name in CASES_OF_0_1 else "checkpoints_0_2")
    return mindspore.load_checkpoint(str(folder / f"{name}.ckpt")), dict(np.load(folder / f"{name}.npz"))


# What a forward only reads is copied, too, since version 0.3.
COPIED_NOW = {"retried": ["forward_state.first.gain"], "own_scales": ["forward_state.first.gain"]}


def assert_finishes(cell, name, expected):
    finished = finish(cell, name)
    assert finished.keys() == expected.keys() | set(COPIED_NOW.get(name, ()))
    if name == "alternating":
        # In the fifth cycle the second network waits. Both its turns before were skipped, the last of which counted
        # in 0.1.
        waits = slice(2, 2 + STEPS)
        expected["returned.3"][waits, 1] = 0.0
        expected["returned.0"][waits] = expected["returned.3"][waits, 0]
    assert [key for key in expected if not same_bits(finished[key], expected[key])] == []


@pytest.mark.parametrize("name", CASES)
def test_resumes_bit_for_bit(name, mode):
    checkpoint, expected = load(name)
    # From other weights and another scale: what is not loaded shows.
    cell = build(name, start=-3.0)
    cell.set_loss_scale(1.0)
    assert mindspore.load_param_into_net(cell, checkpoint, strict_load=True) == (COPIED_NOW.get(name, []), [])
    assert_finishes(cell, name, expected)
    # The same cell in the middle of another cycle, and at its end.
    train(cell, name, 2, 12)
    for _ in range(2):
        # Read again, since the cell may have taken over what it was given.
        assert cell.load_state_dict(load(name)[0]) == ([], [])
        assert_finishes(cell, name, expected)


@pytest.mark.parametrize("name", CASES)
def test_training_arrives_at_the_checkpoint(name, mode, tmp_path):
    checkpoint, _ = load(name)
    cell = build(name)
    train(cell, name, 0, STOP)
    mindspore.save_checkpoint(cell, str(tmp_path / "cell.ckpt"))
    written = mindspore.load_checkpoint(str(tmp_path / "cell.ckpt"))
    assert written.keys() == checkpoint.keys() | set(COPIED_NOW.get(name, ()))
    different = {key for key in checkpoint if not same_bits(written[key].asnumpy(), checkpoint[key].asnumpy())}
    # These had the plain count of the cycle's calls.
    counts = {key for key in checkpoint if key.endswith((".micro_steps", "alternation.calls")) and checkpoint[key] > 0}
    assert [int(written[key]) - int(checkpoint[key]) for key in counts] == [STEPS * 2**16] * len(counts)
    # And this the losses of the cycle's last call.
    turns = {"alternation.last_losses"} if name == "alternating" else set()
    assert different == counts | turns
