"""What docs/data_parallel.md says of the cost of data parallelism, against the benchmark that says so."""

import sys

import pytest
from support.python_process import ROOT, check_python

SCRIPT = ROOT / "benchmarks" / "data_parallel.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    # A name that no other module has.
    import data_parallel

    yield data_parallel
    del sys.modules["data_parallel"]


def test_the_page_has_the_calculated_numbers(tmp_path):
    page = (ROOT / "docs" / "data_parallel.md").read_text()
    table = [line for line in check_python(SCRIPT, "--calculate", cwd=tmp_path).splitlines() if line.startswith("|")]
    assert len(table) == 10
    assert "\n".join(table) in page


@pytest.mark.slow
def test_the_page_has_the_numbers_that_compiled_steps_send(benchmark, capsys):
    page = (ROOT / "docs" / "data_parallel.md").read_text()
    benchmark.print_counts()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 11
    assert "\n".join(table) in page


@pytest.mark.nightly
def test_sharing_sends_each_gradient_and_each_weight_once(benchmark):
    weights = 4 * benchmark.SHARED_LAYERS * benchmark.SHARED_WIDTH**2
    flag = 4
    sent = benchmark.run_ranks("share", 2)["sent"]
    assert sent == {"plain": [weights + flag, 0], "shared": [weights + flag, weights // 2]}
    page = (ROOT / "docs" / "data_parallel.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| 2 ") and " MB" not in line and "ms |" in line)
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == [f"{weights / 1e6:.0f}"] * 2


def test_a_ring_sends_twice_the_bytes_at_most(benchmark):
    """Without latency, two ranks take the time of the bytes once, and very many that of the bytes twice."""
    assert benchmark.ring(2, 100.0, 0.0, 10.0) == pytest.approx(10.0)
    assert benchmark.ring(10**9, 100.0, 0.0, 10.0) == pytest.approx(20.0)
    assert benchmark.ring(4, 0.0, 1.0, 10.0) == 6.0
    assert benchmark.tree(1024, 1.0) == 20.0
