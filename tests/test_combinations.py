"""Accumulation, clipping and moving averages, freely combined in every cell and mode, against a NumPy control."""

import pytest
from support.linear_pair import CELLS, Trained

pytestmark = pytest.mark.long

CLIPS = {"no_clip": {}, "clip_norm": {"clip_norm": 0.7}, "clip_value": {"clip_value": 0.3}}

# What overflows in each call: neither network, the first, the second, or both. With three calls in a window these are
# windows that overflow nowhere (so that the scale grows), at their first, middle and last call, twice, and for one
# network only; with one call in a window each is a step.
NONE, FIRST, SECOND, BOTH = (False, False), (True, False), (False, True), (True, True)
CALLS = [
    *(NONE, NONE, NONE),
    *(NONE, NONE, NONE),
    *(FIRST, NONE, NONE),
    *(NONE, NONE, NONE),
    *(NONE, BOTH, NONE),
    *(NONE, NONE, SECOND),
    *(NONE, SECOND, FIRST),
    *(NONE, NONE, NONE),
    *(NONE, NONE, NONE),
]


@pytest.mark.parametrize("ema_decay", [None, 0.75], ids=["no_ema", "ema"])
@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize("steps", [1, 3], ids=["every_call", "accumulation"])
@pytest.mark.parametrize("kind", CELLS)
def test_agrees_with_the_control(mode, kind, steps, clip, ema_decay):
    trained = Trained(kind, steps=steps, ema_decay=ema_decay, **CLIPS[clip])
    for seed, overflows in enumerate(CALLS):
        trained.call(seed, overflows)
    # The calls were such that every verdict saw both outcomes.
    for verdict in trained.verdicts:
        assert verdict.counters["applied_steps"] >= 4
        assert verdict.counters["skipped_steps"] >= 2


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
def test_each_network_may_have_its_own(mode, kind):
    trained = Trained(kind, steps=3, clip_norm=[0.7, None], clip_value=[None, 0.3], ema_decay=[None, 0.75])
    for seed, overflows in enumerate(CALLS):
        trained.call(seed, overflows)
