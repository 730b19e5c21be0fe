"""What a reader passes who follows one step, as `benchmarks/trace_step.py` counts it, does not grow unnoticed."""

import mindspore
import pytest
from support.in_mode import in_mode
from support.python_process import ROOT

FILES, CLASSES, DEEP = 18, 22, 8


@pytest.fixture
def trace_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trace_step

    return trace_step.trace_step


def test_a_plain_step(trace_step):
    with in_mode(mindspore.PYNATIVE_MODE):
        trace = trace_step()
    files, classes, _, deep = trace.counts()
    assert ("step/step.py", "Step", "construct") in trace.functions
    assert files <= FILES and classes <= CLASSES and deep <= DEEP
