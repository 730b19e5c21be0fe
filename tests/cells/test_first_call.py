"""What compiling a step grows with."""

import sys

import pytest
from support.python_process import ROOT


@pytest.mark.slow
def test_retries_compile_less_than_twice_the_nodes(monkeypatch):
    """The networks are in the graph twice, but nothing walks over their gradients one by one."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # A name that no other module has.
    import first_call

    try:
        without, retried = (
            first_call.counted("resnet18_retries", side)["nodes"]["type_inference"]
            for side in ("max_retries=0", "ms_lossscale")
        )
    finally:
        del sys.modules["first_call"]
    assert 0 < without < retried < 2 * without
