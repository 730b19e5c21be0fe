"""Training cells of any configuration do what a reference in plain NumPy does, call by call, and resume bit for bit."""

import ast
import inspect
import re

import numpy as np
import pytest
from conftest import MODES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Tensor
from mindspore import dtype as mstype
from support.configurations import INF, NAN, covering, draw, of_seed, planted, raising
from support.configured_training import check
from support.in_mode import in_mode
from support.python_process import ROOT
from support.reference import SpikeRule

import ms_lossscale as ls

CLASSES = (ls.ScaledTrainOneStepCell, ls.SimultaneousTrainOneStepCell, ls.AlternatingTrainOneStepCell, ls.ManualStep)
QUICK, RAISING = 16, list(raising())
# A call is dropped after a cycle with a dropped call was discarded.
DISCARDING = of_seed(7)


@pytest.mark.parametrize(
    ("its_mode", "configuration"),
    [
        pytest.param(*each, marks=pytest.mark.slow if i >= QUICK else ())
        for i, each in enumerate([*RAISING[:1], DISCARDING, *planted(), *covering(), *RAISING[1:]])
    ],
)
def test_each_two_values_of_different_settings_meet(its_mode, configuration):
    with in_mode(MODES[its_mode]):
        check(configuration)


@pytest.mark.nightly
@settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any(mode, data):
    check(draw(lambda values: data.draw(st.sampled_from(values))))


# What a keyword is called in the reference, if it has another name there.
_IN_REFERENCE = {"gradient_accumulation_steps": "steps", "network_inputs": "positions", "forward_state": "state"}
# What the configurations leave out, and the test that compares it with ordinary training instead.
# What does something on several ranks only, or changes names alone.
_ELSEWHERE = {"gradients_reduced": "ranks/test_data_parallel.py", "name": "cells/test_held_cells.py"}


def names_in(path):  # All names, attributes, keywords and strings of a file.
    attributes = ("id", "attr", "arg", "name", "value")
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if not isinstance(node, ast.Expr)]
    values = [getattr(node, attribute, None) for node in nodes for attribute in attributes]
    return {value for value in values if isinstance(value, str)}


def forgotten(*cells):  # (keyword, where it is missing) for the keywords of these cells.
    tests = ROOT / "tests"
    support = tests / "support"
    drawn = names_in(support / "configurations.py") | names_in(support / "configured_training.py")
    known = names_in(support / "reference.py") | names_in(support / "configured_reference.py")
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    missing = []
    parameters = [each for cell in cells for each in inspect.signature(cell).parameters.values()]
    for name in sorted({each.name for each in parameters if each.kind is each.KEYWORD_ONLY}):
        if name in _ELSEWHERE:
            file = _ELSEWHERE[name]
            missing += [(name, file)] if f"{name}=" not in (tests / file).read_text() else []
        else:
            missing += [(name, "configurations")] if name not in drawn else []
            missing += [(name, "reference")] if _IN_REFERENCE.get(name, name) not in known else []
        if not any(re.search(rf"`{name}\b|\b{name}=", page) for page in pages):
            missing.append((name, "docs"))
    return missing


def test_no_keyword_is_forgotten():
    assert forgotten(*CLASSES) == []


def test_a_new_keyword_would_be_missed_everywhere():
    class More(ls.ScaledTrainOneStepCell):
        def __init__(self, network, optimizer, *, new_keyword=None):
            super().__init__(network, optimizer)

    assert forgotten(More) == [("new_keyword", where) for where in ("configurations", "reference", "docs")]


def test_norm_spike_with_norms_of_any_size():
    for max_norm, norms in (
        (2.0**70, [2.0**61, 1.0, 3.0, 2.0, 2.0, 8.0]),
        (2.0**70, [1.0, 1.0, 1.0, 1.0, 1.0001]),
        (2.0**70, [2.0**70, INF, NAN, 2.0**71, 1.0, 2.0]),
        (None, [1e21, 1.0, 1.5, 1.25, 1e21, 1.3, INF]),
    ):
        condition = ls.NormSpike(max_norm=max_norm, z_score=2.0, window=2)
        rule = SpikeRule(max_norm or INF, 2.0, 2)
        for norm in map(float, np.float32(norms)):
            loss, its = Tensor(0.0, mstype.float32), Tensor(norm, mstype.float32)
            assert bool(condition(loss, its)) == rule.skips(0.0, norm), (norms, norm)
            condition.observe(loss, its)
            rule.observe(0.0, norm)
            for held, wanted in ((condition.mean, rule.mean), (condition.variance, rule.variance)):
                np.testing.assert_allclose(float(held.asnumpy()), wanted, rtol=1e-6)
