"""Whatever a forward writes, however and wherever it keeps it: a step that overflows leaves nothing of it behind."""

import itertools
import re
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mindspore import nn
from support import (
    forward_writing_networks,
    operators_that_write,
    places_of_state,
    ways_by_calls,
    ways_to_reach,
    ways_to_write,
)
from support.forwards import Loss, Training, at_top
from support.operators_that_write import BatchNorm, BufferByCopy
from support.places_of_state import Kept, Place, forget_globals
from support.python_process import is_older_mindspore
from support.ways_by_calls import Keeper, Writer
from support.ways_to_reach import ByMemory
from support.ways_to_write import ByAssign, Way

from ms_lossscale.forward_state import find
from ms_lossscale.forward_state.find import find_forward_state

BOTH = ("graph", "pynative")


def _classes(module, base=nn.Cell):
    classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, base)]
    helpers = (Way, ByMemory, Writer, Keeper, Place, Kept)
    return [cls for cls in classes if cls.__module__ == module.__name__ and cls not in helpers]


# A constant that is clamped once moves no more.
_NETWORKS = set(forward_writing_networks.RUNNABLE) - {forward_writing_networks.ClampedConstant}
WAYS = {
    cls.__name__: cls
    for cls in (
        *_classes(ways_to_write),
        *_classes(ways_to_reach),
        *_classes(ways_by_calls),
        *_classes(operators_that_write),
        *_classes(places_of_state, Kept),
        *sorted(_NETWORKS, key=lambda cls: cls.__name__),
    )
}
PLACES = {cls.__name__: cls for cls in _classes(places_of_state, Place)}

# What is in a list, say, is in no checkpoint, which is said at construction.
pytestmark = pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")

# They keep the scaled gradient: infinite when it overflows, which counts as an overflow that no lower scale can mend.
_OF_THE_BACKWARD = (
    *("ByBackwardHook", "ByHookOfATensor", "ByHookOfAParameter", "ByBackwardOfAFunction"),
    *("ByInsertGradientOf", "ByBprop"),
)


# What MindSpore 2.7 loses in any call of a network, without a training cell, too: graph mode runs these writes in
# Python, on a copy; in PyNative mode what `ops.depend` returns is a copy, so that a view of it is not the Parameter,
# and `parameter.data` can't be set.
_LOST_BEFORE_2_10 = {
    "graph": (
        *("ByAugmentedPartOfADict", "ByAugmentedPartOfAList", "ByAttrgetter", "ByMintInPlace"),
        *("ParameterInANamespace", "ParameterInAnArray"),
    ),
    "pynative": ("ByView", "BySettingItsData"),
}


def _running_in(mode, classes):
    lost = _LOST_BEFORE_2_10[mode] if is_older_mindspore() else ()
    return [cls for cls in classes if mode in getattr(cls, "modes", BOTH) and cls.__name__ not in lost]


# The sequences of steps: the first that overflows is the first of all, the second, or the third.
EARLY = "scale data clean own data1 clean"
SECOND = "clean data scale1 own clean"
THIRD = "clean clean scale other data clean"

CONFIGURATIONS = {
    "single": ("single", EARLY, {}),
    "cycle": ("single", THIRD, {"gradient_accumulation_steps": 2, "ema_decay": 0.5, "clip_norm": 1.0}),
    "simultaneous retries": ("simultaneous", THIRD, {"max_retries": 2}),
    "alternating retries in a cycle": (
        "alternating",
        SECOND,
        {"gradient_accumulation_steps": 2, "max_retries": 2, "ema_decay": 0.5},
    ),
    "average and clipping": ("single", SECOND, {"ema_decay": 0.5, "clip_norm": 1.0}),
    "retries": ("single", THIRD, {"max_retries": 2}),
    "simultaneous": ("simultaneous", THIRD, {}),
    "simultaneous retries in a cycle": (
        "simultaneous",
        EARLY,
        {"gradient_accumulation_steps": 3, "max_retries": 1, "clip_norm": 1.0},
    ),
    "alternating": ("alternating", EARLY, {}),
    "alternating cycle": ("alternating", THIRD, {"gradient_accumulation_steps": 2}),
}
# Each way is in one group, and each group in one of the configurations of `make test`: one compilation for many ways.
QUICK = {
    "graph": ("single", "cycle", "simultaneous retries", "alternating retries in a cycle"),
    "pynative": ("single", "average and clipping", "retries", "alternating"),
}
GROUPS = 4
# Its loop variable is first one Parameter and then another. In graph mode, MindSpore compiles that neither within the
# loop of the retries ("The parameters number of the function is 8, but the number of provided arguments is 10") nor in
# a cycle ("The input_data does not have a valid ptr"), unless the process has compiled certain other networks before.
_ALONE = "InLoops"


def _train(configuration, parts, network=None, kept=()):
    """`kept` are ways to write that the parts keep where nothing but their forward finds them."""
    kind, steps, keywords = configuration
    training = Training(kind, network or Loss(parts), parts, **keywords)
    for way in kept:
        getattr(way, "begin", int)()
    for step in steps.split():
        training.make(step)
    return training


@pytest.fixture(autouse=True)
def _no_globals():
    forget_globals()


def _configured():
    """Each group in each configuration, of which further ones are long, and the rest is for releases."""
    for mode, (i, name), group in itertools.product(QUICK, enumerate(CONFIGURATIONS), range(GROUPS)):
        is_new = name not in QUICK[mode] and (i + group) % 4 == 2
        later = pytest.mark.slow if is_new else pytest.mark.nightly
        yield pytest.param(mode, name, group, marks=[] if QUICK[mode][group] == name else later)


def test_each_way_to_write_what_is_large(monkeypatch):
    """What is too large to be copied in case: its source is read, which finds it, or names it in a warning."""
    monkeypatch.setattr(find, "_FEW", 0)
    for cls in WAYS.values():
        network = cls()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = " ".join(find_forward_state("cell", (network,)).names)
        told = found + "".join(str(each.message) for each in caught)
        names = [parameter.name for parameter in network.get_parameters()]
        written = [name for name in names if re.search(r"loose|memory|variance|mean", name)]
        written = written or ["seen" if "Buffer" in cls.__name__ else f"{cls.__name__}.u"]
        for name in getattr(cls, "writes", written):
            assert name.replace("buffer ", "") in told, cls


@pytest.mark.parametrize("mode, name, group", list(_configured()), indirect=["mode"])
def test_each_way_to_write(mode, name, group):
    retries = "retries" in name
    classes = [WAYS[way] for way in list(WAYS)[group::GROUPS] if not (retries and way in _OF_THE_BACKWARD)]
    classes = _running_in(mode, classes)
    if mode == "graph" and (retries or "cycle" in name):
        classes = [cls for cls in classes if cls is not WAYS[_ALONE]]
    # All of these in one network MindSpore 2.7 fails to compile ("Primitive StopGradient's bprop not defined").
    is_too_much = is_older_mindspore() and mode == "graph" and (name == "single" or group == 2)
    for together in [[cls] for cls in classes] if is_too_much else [classes]:
        cell = _train(CONFIGURATIONS[name], [cls() for cls in together]).cell
        if retries:
            counters = cell.counters()
            assert sum(each["retries"] for each in (counters if isinstance(counters, list) else [counters])) > 0


KINDS = {
    "single": ("single", EARLY, {}),
    "simultaneous": ("simultaneous", SECOND, {}),
    "alternating": ("alternating", THIRD, {}),
}


in_each_cell = pytest.mark.parametrize(
    "kind", [kind if kind == "single" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)


@in_each_cell
def test_each_place(kind, mode):
    classes = _running_in(mode, PLACES.values())
    _train(KINDS[kind], [cls(part()) for cls in classes for part in (ByAssign, BufferByCopy, BatchNorm)])


@in_each_cell
def test_at_the_top(kind, mode):
    network = at_top(ByAssign)()
    _train(KINDS[kind], [network], network)


@st.composite
def forwards(draw, mode):
    """Ways to write, the places where they are kept, and a configuration."""
    ways = st.sampled_from([cls.__name__ for cls in _running_in(mode, WAYS.values())])
    chosen = draw(st.lists(st.tuples(ways, st.sampled_from(sorted(PLACES))), min_size=1, max_size=3, unique=True))
    keywords = {
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "max_retries": draw(st.integers(0, 2)),
        "ema_decay": draw(st.sampled_from([None, 0.5])),
        "clip_norm": draw(st.sampled_from([None, 1.0])),
    }
    steps = draw(st.lists(st.sampled_from(["clean", "data", "data1", "scale", "scale2", "own", "other"]), max_size=5))
    return chosen, (draw(st.sampled_from(sorted(KINDS))), " ".join([*steps, "scale", "clean", "data"]), keywords)


def _check_random(mode, data):
    chosen, configuration = data.draw(forwards(mode))
    chosen = [(way, place) for way, place in chosen if (mode, way) != ("graph", _ALONE)]
    forget_globals()
    ways = [WAYS[way]() for way, _ in chosen]
    parts = [PLACES[place](way) for way, (_, place) in zip(ways, chosen)]
    _train(configuration, parts, kept=ways)


_RANDOM = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    # Without shrinking: each example compiles.
    "phases": [Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@settings(max_examples=1, **_RANDOM)
@given(data=st.data())
def test_random_forwards(mode, data):
    _check_random(mode, data)


@pytest.mark.nightly
@settings(max_examples=30, **_RANDOM)
@given(data=st.data())
def test_many_random_forwards(mode, data):
    _check_random(mode, data)
