"""Tests that leave MindSpore in another state, or need it untouched, in a process of their own."""

from pathlib import Path

import pytest
from conftest import nightly, slow
from support.python_process import run_python

FOLDER = Path(__file__).parent / "own_process"


@pytest.mark.parametrize(
    "file, marks",
    [
        ("refused_by_compiled_code.py", "not slow and not nightly"),
        ("refused_by_compiled_steps.py", "not slow and not nightly"),
        ("two_threads.py", "not slow and not nightly"),
        ("two_held_cells.py", "not slow and not nightly"),
        *slow(
            ("refused_by_compiled_code.py", "slow"), ("thousand_parameters.py", "slow"), ("two_held_cells.py", "slow")
        ),
        *nightly(("two_held_cells.py", "nightly")),
    ],
)
def test_in_a_process_of_its_own(file, marks, tmp_path):
    options = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", marks)
    result = run_python(*options, FOLDER / file, cwd=tmp_path, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
