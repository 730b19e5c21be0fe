"""Checkpoints that earlier versions wrote in the middle of a cycle, with everything on, resume bit for bit."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from support.checkpoints_of_releases import CALLS, CASES, CASES_OF_0_1, STEPS, STOP, build, finish, inputs, train
from support.training import same_bits, state

pytestmark = pytest.mark.long

GOLDEN = Path(__file__).parent / "golden"


def load(name):
    folder = GOLDEN / ("checkpoints_0_1" if name in CASES_OF_0_1 else "checkpoints_0_2")
    expected = dict(np.load(folder / f"{name}.npz"))
    return mindspore.load_checkpoint(str(folder / f"{name}.ckpt")), {
        key: value for key, value in expected.items() if not key.endswith(REMOVED)
    }


# Since version 0.3, what a forward only reads is copied, too, and alternating networks tell what each of them wrote of
# what several may write.
ADDED = {
    "retried": ["forward_state.first.gain"],
    "own_scales": ["forward_state.first.gain"],
    "alternating": [f"network_{i}.accumulation.wrote_shared" for i in range(2)],
}


# Since version 0.4, the gradients whose norm is measured are unscaled.
REMOVED = "clipping.scale"


def with_statistics(expected, begun, first, last):
    """
    Returns what is expected of `alternating` after the calls from `first` to before `last`, with the statistics of the
    first network, whose calls began with `begun`. In 0.1, a skipped step of the second one, which reaches them but does
    not write them, undid what the first one had written.
    """
    mean, variance = begun["first.norm.moving_mean"], begun["first.norm.moving_variance"]
    skipped = {call // STEPS for call, networks in CASES["alternating"].overflows.items() if 0 in networks}
    copied = mean, variance
    for call in range(first, last):
        if call % STEPS == 0:
            copied = mean, variance
        samples = inputs("alternating", call)[2].asnumpy()
        mean = (mean + samples.mean(axis=0)) / 2
        variance = (variance + samples.var(axis=0, ddof=1)) / 2
        if call % STEPS == STEPS - 1 and call // STEPS in skipped:
            mean, variance = copied
    corrected = dict(expected)
    for prefix, values in {"": (mean, variance), **{f"network_{i}.forward_state.": copied for i in range(2)}}.items():
        corrected.update(zip((f"{prefix}first.norm.moving_mean", f"{prefix}first.norm.moving_variance"), values))
    return corrected


def assert_finishes(cell, name, expected):
    begun = state(cell)
    finished = finish(cell, name)
    assert finished.keys() == expected.keys() | set(ADDED.get(name, ()))
    if name == "alternating":
        # In the fifth cycle the second network waits. Both its turns before were skipped, the last of which counted
        # in 0.1.
        waits = slice(2, 2 + STEPS)
        expected["returned.3"][waits, 1] = 0.0
        expected["returned.0"][waits] = expected["returned.3"][waits, 0]
        expected = with_statistics(expected, begun, STOP, CALLS)
    assert [key for key in expected if not same_bits(finished[key], expected[key])] == []


@pytest.mark.parametrize("name", CASES)
def test_resumes_bit_for_bit(name, mode):
    checkpoint, expected = load(name)
    # From other weights and another scale: what is not loaded shows.
    cell = build(name, start=-3.0)
    cell.set_loss_scale(1.0)
    assert mindspore.load_param_into_net(cell, checkpoint, strict_load=True) == (
        ADDED.get(name, []),
        [key for key in checkpoint if key.endswith(REMOVED)],
    )
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
    checkpoint = {key: its.asnumpy() for key, its in checkpoint.items() if not key.endswith(REMOVED)}
    if name == "alternating":
        checkpoint = with_statistics(checkpoint, state(cell), 0, STOP)
    train(cell, name, 0, STOP)
    mindspore.save_checkpoint(cell, str(tmp_path / "cell.ckpt"))
    written = mindspore.load_checkpoint(str(tmp_path / "cell.ckpt"))
    assert written.keys() == checkpoint.keys() | set(ADDED.get(name, ()))
    different = {key for key in checkpoint if not same_bits(written[key].asnumpy(), checkpoint[key])}
    # These had the plain count of the cycle's calls.
    counts = {key for key in checkpoint if key.endswith((".micro_steps", "alternation.calls")) and checkpoint[key] > 0}
    assert [int(written[key]) - int(checkpoint[key]) for key in counts] == [STEPS * 2**16] * len(counts)
    # And this the losses of the cycle's last call.
    turns = {"alternation.last_losses"} if name == "alternating" else set()
    assert different == counts | turns
