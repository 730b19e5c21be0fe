"""The example of advise_float32, run as a user runs it."""

import importlib.util
import re

import pytest
from support.python_process import ROOT, run_python

for package in ("mlxtend", "tabulate", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install ms_lossscale[examples]")

pytestmark = pytest.mark.slow

HAS_MINDCV = importlib.util.find_spec("mindcv") is not None
SCRIPT = ROOT / "examples" / "diagnosis" / "advise.py"
ENTRY = re.compile(r"(\d+\.\d) %, (\d+) of (\d+) skipped")


def run_rows(*options, cwd):
    """The table: from a network to the accuracy in percent, the skipped and all steps of its three trainings."""
    result = run_python(SCRIPT, *options, cwd=cwd, timeout=900)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    rows = {}
    for line in lines:
        name, *entries = (entry.strip() for entry in line.strip("|").split("|"))
        rows[name] = [tuple(map(float, ENTRY.fullmatch(entry).groups())) for entry in entries]
    return rows


MINDCV = pytest.param("mindcv-resnet18", marks=pytest.mark.skipif(not HAS_MINDCV, reason="`make toolkits` has mindcv"))


@pytest.mark.parametrize("network", ["transformer", "resnet", MINDCV])
def test_float16_learns_as_float32_does_with_the_advice(tmp_path, network):
    rows = run_rows("--networks", network, cwd=tmp_path)
    assert set(rows) == {network}
    for float32, stuck, advised in rows.values():
        assert stuck[1] == stuck[2]
        assert stuck[0] < 20
        assert float32[0] > 30
        assert advised[0] > float32[0] - 5
