"""What a reader passes who follows one step, as `benchmarks/trace_step.py` counts it, does not grow unnoticed."""

import mindspore
import pytest
from support.in_mode import in_mode
from support.python_process import ROOT

FILES, CLASSES, DEEP = 21, 31, 10

BASE = '''"""Two lines
of a docstring."""

# A comment.
TEXT = """Two lines of code,

or three."""


class Base:
    """A docstring."""

    value = 1  # Code.

    class Inner:
        pass
'''
LONG = '''def outer():
    """A docstring."""

    @property
    def inner():
        # A comment.
        return """
            A text."""
'''


@pytest.fixture
def trace_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trace_step

    return trace_step


def test_a_plain_step(trace_step):
    with in_mode(mindspore.PYNATIVE_MODE):
        trace = trace_step.trace_step()
    files, classes, _, deep = trace.counts()
    assert ("step/step.py", "Step", "construct") in trace.functions
    # Counted for the class that defines it, and not for the scale that was passed.
    assert ("loss_scale/base.py", "LossScale", "advance") in trace.functions
    assert files <= FILES and classes <= CLASSES and deep <= DEEP


def test_the_size_of_a_package(trace_step, tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "base.py").write_text(BASE)
    (tmp_path / "long.py").write_text(LONG)
    assert trace_step.sizes(tmp_path) == [
        ("lines of code", 7 + 5, "2 files"),
        ("classes", 2, "step/"),
        ("lines of the longest function", 7, "long.py: outer"),
        ("lines of the longest file", 16, "step/base.py"),
    ]
