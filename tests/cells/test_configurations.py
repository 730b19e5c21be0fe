"""Training cells of any configuration do what a reference in plain NumPy does, call by call, and resume bit for bit."""

import ast
import inspect
import re

import pytest
from conftest import MODES, quick_in_graph_mode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.configurations import NAN, Call, Configuration, covering, draw
from support.configured_training import ConfiguredTraining, check
from support.in_mode import in_mode
from support.python_process import ROOT

from ms_lossscale import AlternatingTrainOneStepCell, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

CELLS = (ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell)
# The first cover nine tenths of all pairs.
QUICK = 13


@pytest.mark.parametrize(
    ("its_mode", "configuration"),
    [pytest.param(*each, marks=pytest.mark.slow if i >= QUICK else ()) for i, each in enumerate(covering())],
)
def test_each_two_values_of_different_settings_meet(its_mode, configuration):
    with in_mode(MODES[its_mode]):
        check(configuration)


_RANDOM = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def _check_random(data):
    check(draw(lambda values: data.draw(st.sampled_from(values))))


@pytest.mark.slow
@settings(max_examples=6, **_RANDOM)
@given(st.data())
def test_any(mode, data):
    _check_random(data)


@pytest.mark.nightly
@settings(max_examples=40, **_RANDOM)
@given(st.data())
def test_many(mode, data):
    _check_random(data)


def alternating(slopes, **keywords):
    """A configuration of two networks, with the slopes of both in each call."""
    keywords = {"gradient_accumulation_steps": 1, "max_retries": 0, **keywords}
    calls = [Call(pair, None, ()) for pair in slopes]
    return Configuration("alternating", 2, ["plain"], ["nn.SGD"] * 2, keywords, False, calls, None, len(calls))


def test_the_loss_of_a_turn_that_was_skipped_does_not_count():
    training = ConfiguredTraining(alternating([[1.0, 1.0], [1.0, NAN], [1.0, 1.0]], every=[1, 2]))
    losses = [float(training.call(index)[3][1]) for index in range(3)]
    assert losses[2] == 0.0


@quick_in_graph_mode
def test_nor_does_that_of_an_earlier_call_of_a_cycle_that_was_skipped(mode):
    # The second network takes part in each second cycle of two calls. Two of its cycles are flushed after one call.
    cycles = ["..", ".N", "..", ".|", "..", "N|", "..", "..", "."]
    slopes = [[1.0, NAN if call == "N" else 1.0] for cycle in cycles for call in cycle.strip("|")]
    training = ConfiguredTraining(alternating(slopes, every=[1, 2], gradient_accumulation_steps=2))
    shown = []
    for cycle in cycles:
        shown.append([])
        for call in cycle:
            if call == "|":
                training.act(("flush",))
            else:
                shown[-1].append(float(training.call(sum(map(len, shown)))[3][1]))
    nothing, flushed, whole = 0.0, shown[3][0], shown[7][1]
    assert len({nothing, shown[1][0], flushed, shown[7][0], whole}) == 5
    assert [shown[i] for i in (0, 2, 4, 6, 8)] == [[nothing] * 2, [nothing] * 2, [flushed] * 2, [flushed] * 2, [whole]]


@quick_in_graph_mode
def test_a_cycle_goes_back_only_if_all_networks_that_wrote_in_it_were_skipped(mode):
    # Each pair of calls is a cycle of both networks. The second one can reach the first one's own mean and count.
    slopes = [[1.0, 1.0], [1.0, NAN], [NAN, 1.0], [1.0, 1.0], [NAN, 1.0], [1.0, NAN], [1.0, NAN], [1.0, 1.0]]
    training = ConfiguredTraining(alternating([*slopes, [NAN, NAN]], gradient_accumulation_steps=2))
    counts = []
    for index in range(9):
        training.call(index)
        if index % 2 or index == 8:
            training.act(("flush",))
            banks = [training.networks[0].shared, *(network.own for network in training.networks)]
            counts.append([int(bank.count.asnumpy()) for bank in banks])
    assert [counters["applied_steps"] for counters in training.cell.counters()] == [2, 1]
    assert counts == [[4, 2, 0], [8, 2, 2], [8, 2, 2], [12, 4, 2], [12, 4, 2]]


# What a keyword is called in the reference, if it has another name there.
_IN_REFERENCE = {"gradient_accumulation_steps": "steps", "gradient_transforms": "transform"}
# What the configurations leave out, and the test that compares it with NumPy or with ordinary training instead.
_ELSEWHERE = {
    "network_inputs": ("test_simultaneous_train_one_step_cell.py", "all configurations have the same"),
    "has_aux": ("test_aux.py", "it is returned, and changes nothing"),
    "forward_state": ("test_what_the_forward_writes.py", "the networks' own state is found"),
    "after_update": ("test_moving_average.py", "it has no inputs, and is a call at one place"),
    "gradients_reduced": ("test_data_parallel.py", "it does something with several ranks only"),
    "overflow_detector": ("test_overflow_detector.py", "the reference has no register"),
}


def names_in(path):
    """Returns all names, attributes, keywords and strings of a file."""
    attributes = ("id", "attr", "arg", "name", "value")
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if not isinstance(node, ast.Expr)]
    values = [getattr(node, attribute, None) for node in nodes for attribute in attributes]
    return {value for value in values if isinstance(value, str)}


def forgotten(*cells):
    """Returns (keyword, where it is missing) for the keywords of these cells."""
    tests = ROOT / "tests"
    support = tests / "support"
    drawn = names_in(support / "configurations.py") | names_in(support / "configured_training.py")
    known = names_in(support / "reference.py")
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    missing = []
    parameters = [each for cell in cells for each in inspect.signature(cell).parameters.values()]
    for name in sorted({each.name for each in parameters if each.kind is each.KEYWORD_ONLY}):
        if name in _ELSEWHERE:
            file, _ = _ELSEWHERE[name]
            missing += [(name, file)] if f"{name}=" not in (tests / file).read_text() else []
        else:
            missing += [(name, "configurations")] if name not in drawn else []
            missing += [(name, "reference")] if _IN_REFERENCE.get(name, name) not in known else []
        if not any(re.search(rf"`{name}\b|\b{name}=", page) for page in pages):
            missing.append((name, "docs"))
    return missing


def test_no_keyword_is_forgotten():
    assert forgotten(*CELLS) == []


def test_a_new_keyword_would_be_missed_everywhere():
    class More(ScaledTrainOneStepCell):
        def __init__(self, network, optimizer, *, new_keyword=None):
            super().__init__(network, optimizer)

    assert forgotten(More) == [("new_keyword", where) for where in ("configurations", "reference", "docs")]
