"""However a forward writes its registered state, a step that overflows leaves nothing of it behind."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.forwards import Training
from support.python_process import is_older_mindspore
from support.ways_to_write import WAYS

# What MindSpore 2.7 loses in any call of a network, without a training cell, too.
_LOST_BEFORE_2_10 = {"graph": ("ByMintInPlace",), "pynative": ("ByView",)}


def _running_in(mode):
    lost = _LOST_BEFORE_2_10[mode] if is_older_mindspore() else ()
    return [cls for cls in WAYS if mode in cls.modes and cls.__name__ not in lost]


# The sequences of steps: the first that overflows is the first of all, the second, or the third.
EARLY = "scale data clean own data1 clean"
SECOND = "clean data scale1 own clean"
THIRD = "clean clean scale other data clean"

AVERAGED = {"ema_decay": 0.5, "clip_norm": 1.0}
CONFIGURATIONS = {
    "single": ("single", EARLY, AVERAGED),
    "single retries": ("single", THIRD, {"max_retries": 2}),
    "single cycle": ("single", THIRD, {"gradient_accumulation_steps": 2, **AVERAGED}),
    "simultaneous": ("simultaneous", SECOND, {}),
    "simultaneous retries cycle": ("simultaneous", EARLY, {"gradient_accumulation_steps": 3, "max_retries": 1}),
    "alternating": ("alternating", EARLY, {}),
    "alternating cycle": ("alternating", THIRD, {"gradient_accumulation_steps": 2}),
    "alternating retries cycle": ("alternating", SECOND, {"gradient_accumulation_steps": 2, "max_retries": 2}),
}
# One compilation for all ways.
QUICK = {"graph": ("single cycle",), "pynative": ("single",)}
SLOW = {
    "graph": ("single retries", "alternating", "alternating retries cycle"),
    "pynative": ("single retries", "alternating cycle"),
}


def _configured():
    for mode, its in QUICK.items():
        for name in CONFIGURATIONS:
            later = pytest.mark.slow if name in SLOW[mode] else pytest.mark.nightly
            yield pytest.param(mode, name, marks=[] if name in its else later)


def _train(configuration, parts):
    kind, steps, keywords = configuration
    training = Training(kind, parts, **keywords)
    for step in steps.split():
        training.make(step)
    return training.cell


@pytest.mark.parametrize("mode, name", list(_configured()), indirect=["mode"])
def test_each_way_to_write(mode, name):
    retries = "retries" in name
    classes = [cls for cls in _running_in(mode) if not (retries and cls.is_of_the_backward)]
    cell = _train(CONFIGURATIONS[name], [cls() for cls in classes])
    if retries:
        counters = cell.counters()
        assert sum(each["retries"] for each in (counters if isinstance(counters, list) else [counters])) > 0


@st.composite
def forwards(draw, mode):
    """Ways to write, and a configuration."""
    chosen = draw(st.lists(st.sampled_from(_running_in(mode)), min_size=1, max_size=3, unique=True))
    keywords = {
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "max_retries": draw(st.integers(0, 2)),
        "ema_decay": draw(st.sampled_from([None, 0.5])),
        "clip_norm": draw(st.sampled_from([None, 1.0])),
    }
    steps = draw(st.lists(st.sampled_from(["clean", "data", "data1", "scale", "scale2", "own", "other"]), max_size=5))
    kind = draw(st.sampled_from(["single", "simultaneous", "alternating"]))
    return chosen, (kind, " ".join([*steps, "scale", "clean", "data"]), keywords)


@pytest.mark.nightly
@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    # Without shrinking: each example compiles.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_forwards(mode, data):
    chosen, configuration = data.draw(forwards(mode))
    _train(configuration, [cls() for cls in chosen])
