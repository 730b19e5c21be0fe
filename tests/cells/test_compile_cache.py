"""MindSpore's compile cache: training cells train the same with it, and what can't is refused."""

from pathlib import Path

import mindspore
import pytest
from mindspore import nn
from support.manual_training import adam, regression
from support.python_process import run_python

from ms_lossscale import DynamicLossScale, ManualStep

PROGRAM = Path(__file__).parents[1] / "support" / "cached_training.py"


def two_runs(kind, folder):
    """Returns what the program prints in two processes, of which the second loads what the first has compiled."""
    cache = folder / "cache"
    variables = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(cache)}
    first = run_python(PROGRAM, kind, cwd=folder, **variables)
    assert first.returncode == 0, first.stderr[-3000:]
    saved = {path: path.stat().st_mtime_ns for path in cache.rglob("*.mindir")}
    assert saved
    second = run_python(PROGRAM, kind, cwd=folder, **variables)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.mindir")} == saved
    return first.stdout, second


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scaled", "simultaneous"])
def test_a_training_cell_trains_the_same(tmp_path, kind):
    first, second = two_runs(kind, tmp_path)
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stdout == first


@pytest.mark.slow
def test_mindspore_itself_loads_functions_without_their_weights(tmp_path):
    """Once it does not, a ManualStep need not refuse the cache."""
    first, second = two_runs("stock_function", tmp_path)
    assert second.returncode != 0 or second.stdout != first


def test_a_manual_step_refuses_it(monkeypatch):
    network = regression()
    optimizer, loss_scale = adam(network), DynamicLossScale()
    says = r"For 'ManualStep', MindSpore's compile cache must be off.*Unset MS_COMPILER_CACHE_ENABLE"
    with monkeypatch.context() as patched:
        patched.setenv("MS_COMPILER_CACHE_ENABLE", "1")
        with pytest.raises(RuntimeError, match=says):
            ManualStep(network, optimizer, loss_scale)
    try:
        mindspore.set_context(enable_compile_cache=True)
        with pytest.raises(RuntimeError, match=says):
            ManualStep(network, optimizer, loss_scale)
    finally:
        mindspore.set_context(enable_compile_cache=False)
    # Nothing was changed, and it may be constructed now.
    assert isinstance(ManualStep(network, optimizer, loss_scale), nn.Cell)
