"""Checkpoints that earlier versions wrote in the middle of a cycle, with everything on, resume bit for bit."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode
from support.checkpoints_of_releases import (
    CALLS,
    CASES,
    CASES_OF_0_1,
    CASES_OF_0_2,
    STEPS,
    STOP,
    build,
    finish,
    inputs,
    train,
    train_to_stop,
)
from support.training import same_bits, state

LENGTHS = ("accumulation.steps", "alternation.steps")
GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = {"0.1": CASES_OF_0_1, "0.2": CASES_OF_0_2, "0.3": CASES}


def releases(name):
    """Returns the releases that wrote a checkpoint of this case."""
    return [release for release, names in RELEASES.items() if name in names]


def load(release, name):
    folder = GOLDEN / f"checkpoints_{release.replace('.', '_')}"
    expected = dict(np.load(folder / f"{name}.npz"))
    return mindspore.load_checkpoint(str(folder / f"{name}.ckpt")), {
        key: value for key, value in expected.items() if not key.endswith(REMOVED)
    }


# Since version 0.3, what a forward only reads is copied, too, and alternating networks tell what each of them wrote of
# what several may write.
ADDED_IN_0_3 = {
    "retried": ["forward_state.first.gain"],
    "own_scales": ["forward_state.first.gain"],
    "alternating": [f"network_{i}.accumulation.wrote_shared" for i in range(2)],
}


# Since version 0.4, the gradients whose norm is measured are unscaled.
REMOVED = "clipping.scale"


def added(release, name):
    """Returns the names that the checkpoint does not have yet."""
    names = [] if release == "0.3" else ADDED_IN_0_3.get(name, [])
    # Since version 0.4, the length of a cycle, and whether a scale was set within it, have Parameters of their own.
    if name in ("alternating", "sharing"):
        lengths = scales = ["network_0.", "network_1."]
        names = [*names, "alternation.steps"]
    else:
        lengths = [""]
        scales = ["network_0.", "network_1."] if name in ("own_scales", "set_by_hand") else [""]
    # Nor weights of losses, and why steps were skipped.
    of_steps = ("accumulation.is_weighted", "accumulation.loss_not_finite", "accumulation.state_not_finite")
    of_steps += ("accumulation.steps", "step_counters.skip_reasons")
    names = [*names, *(f"{prefix}{its}" for prefix in lengths for its in of_steps)]
    weights = [""] if name.startswith(("scaled", "retried")) else ["network_0.", "network_1."]
    names = [*names, *(f"{prefix}accumulation.sum_of_weights" for prefix in weights)]
    return sorted([*names, *(f"{prefix}accumulation.scale_is_set" for prefix in scales)])


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


def assert_finishes(cell, release, name, expected):
    begun = state(cell)
    finished = finish(cell, name)
    assert finished.keys() == expected.keys() | set(added(release, name))
    if (release, name) == ("0.1", "alternating"):
        # In the fifth cycle the second network waits. Both its turns before were skipped, the last of which counted
        # in 0.1.
        waits = slice(2, 2 + STEPS)
        expected["returned.3"][waits, 1] = 0.0
        expected["returned.0"][waits] = expected["returned.3"][waits, 0]
        expected = with_statistics(expected, begun, STOP, CALLS)
    assert [key for key in expected if not same_bits(finished[key], expected[key])] == []


@quick_in_graph_mode
@pytest.mark.parametrize("name", CASES)
def test_resumes_bit_for_bit(name, mode):
    oldest = releases(name)[0]
    checkpoint, expected = load(oldest, name)
    # From other weights and another scale: what is not loaded shows.
    cell = build(name, start=-3.0)
    cell.set_loss_scale(1.0)
    missing, unexpected = mindspore.load_param_into_net(cell, checkpoint, strict_load=True)
    assert (sorted(missing), unexpected) == (added(oldest, name), [key for key in checkpoint if key.endswith(REMOVED)])
    assert_finishes(cell, oldest, name, expected)
    for release in releases(name):
        # The same cell in the middle of another cycle in which a scale was set by hand, and at its end.
        train(cell, name, 2, 5)
        for _ in range(2):
            cell.set_loss_scale(1.0)
            # Read again, since the cell may have taken over what it was given.
            checkpoint, expected = load(release, name)
            mindspore.load_param_into_net(cell, checkpoint)
            assert_finishes(cell, release, name, expected)
        train(cell, name, 2, 5)
        for _ in range(2):
            cell.set_loss_scale(1.0)
            assert cell.load_state_dict(load(release, name)[0]) == ([], [])
            assert_finishes(cell, release, name, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_arrives_at_the_checkpoint(name, mode, tmp_path):
    cell = build(name)
    begun = state(cell)
    train_to_stop(cell, name)
    mindspore.save_checkpoint(cell, str(tmp_path / "cell.ckpt"))
    written = {key: its.asnumpy() for key, its in mindspore.load_checkpoint(str(tmp_path / "cell.ckpt")).items()}
    assert {int(written[key]) for key in written if key.endswith(LENGTHS)} == {STEPS}
    for release in releases(name):
        checkpoint = {key: its.asnumpy() for key, its in load(release, name)[0].items() if not key.endswith(REMOVED)}
        # These had the losses of the cycle's last call.
        different = set()
        if (release, name) == ("0.1", "alternating"):
            checkpoint = with_statistics(checkpoint, begun, 0, STOP)
            different = {"alternation.last_losses"}
        assert written.keys() == checkpoint.keys() | set(added(release, name))
        counts = {key for key in checkpoint if key.endswith((".micro_steps", "alternation.calls"))}
        assert {int(written[key]) for key in counts} == {STOP % STEPS}
        # In 0.3, the count had the cycle's length in its high half, and a scale was negative if it was set by hand.
        different |= counts if release == "0.3" else set()
        scales = {key for key in checkpoint if key.endswith("accumulation.loss_scale")}
        is_set = {key for key in scales if written[key.replace("loss_scale", "scale_is_set")]}
        assert is_set == {key for key in scales if checkpoint[key] < 0}
        assert bool(is_set) == (name == "set_by_hand")
        assert all(written[key] == -checkpoint[key] for key in is_set)
        assert {key for key in checkpoint if not same_bits(written[key], checkpoint[key])} == different | is_set
