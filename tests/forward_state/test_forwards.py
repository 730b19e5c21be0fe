"""However a forward writes its registered state, a step that overflows leaves nothing of it behind."""

import pytest
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


@pytest.mark.parametrize("mode, name", list(_configured()), indirect=["mode"])
def test_each_way_to_write(mode, name):
    retries = "retries" in name
    classes = [cls for cls in _running_in(mode) if not (retries and cls.is_of_the_backward)]
    kind, steps, keywords = CONFIGURATIONS[name]
    training = Training(kind, [cls() for cls in classes], **keywords)
    for step in steps.split():
        training.make(step)
    if retries:
        counters = training.cell.counters()
        assert sum(each["retries"] for each in (counters if isinstance(counters, list) else [counters])) > 0
