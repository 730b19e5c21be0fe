"""What data parallelism sends, as docs/data_parallel.md says, and what the benchmark calculates."""

import sys

import pytest
from support.python_process import ROOT

SCRIPT = ROOT / "benchmarks" / "data_parallel.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    # A name that no other module has.
    import data_parallel

    yield data_parallel
    del sys.modules["data_parallel"]


@pytest.mark.slow
def test_each_check_adds_one_message_of_4_bytes(benchmark):
    counts = benchmark.run_ranks("count", 2)
    number, size = counts.pop("nn.TrainOneStepCell")
    flags = {"Scaled, nothing checked": 0, "Alternating, 2 networks": 2}
    for name, its in counts.items():
        networks = int(name.split()[1]) if name.endswith("networks") else 1
        flag = flags.get(name, 1)
        assert its == [networks * number + flag, networks * size + 4 * flag], name
    assert len(counts) == 8


@pytest.mark.nightly
def test_sharing_sends_each_gradient_and_each_weight_once(benchmark):
    weights = 4 * benchmark.SHARED_LAYERS * benchmark.SHARED_WIDTH**2
    flag = 4
    sent = benchmark.run_ranks("share", 2)["sent"]
    assert sent == {"plain": [weights + flag, 0], "shared": [weights + flag, weights // 2]}
