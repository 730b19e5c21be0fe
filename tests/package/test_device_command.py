"""`make device`, on CPU: each part is told in the report, also one that is stopped at its time limit."""

import pytest
from support.python_process import ROOT, run_python

pytestmark = pytest.mark.slow

PARTS = ["self-check", "tests", "benchmark"]


def reported(tmp_path, *options):
    arguments = [ROOT / "benchmarks" / "device.py", "--device", "CPU", "--short", "--output", tmp_path / "device"]
    result = run_python(*arguments, "--processes", "1", *options, cwd=tmp_path, timeout=600)
    text = (tmp_path / "device" / "report.md").read_text()
    assert text in result.stdout
    sections = dict(section.split("\n", 1) for section in text.split("\n## ")[1:])
    assert [title.partition(":")[0] for title in sections] == PARTS
    return result.returncode, text, list(sections.values()), list(sections)


def test_what_held_and_what_it_costs(tmp_path):
    status, text, (checks, tests, costs), titles = reported(tmp_path)
    assert status == 0, text
    assert all(": exit status 0, " in title for title in titles)
    assert "- device: CPU, " in text and "- mindspore 2." in text
    assert "10 of 10 checks that ran held." in checks
    assert "4 passed, 0 failed, 0 skipped." in tests
    assert "| tiny " in costs and "| stock " in costs


def test_what_is_stopped_says_how_far_it_came(tmp_path):
    status, text, _, titles = reported(tmp_path, "--minutes", "0.05")
    assert status == 1
    assert all(": stopped at its time limit, " in title for title in titles)
    assert len(text) < 20_000
