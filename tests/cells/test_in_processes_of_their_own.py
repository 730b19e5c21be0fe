"""
Tests that leave MindSpore in another state, or need it untouched, in a process of their own.

After compilations that failed, PyNative mode refuses integers as indices, and graph mode fails to differentiate.
"""

from pathlib import Path

import pytest
from support.python_process import run_python

FOLDER = Path(__file__).parent / "own_process"


@pytest.mark.parametrize("folder", [FOLDER, pytest.param(FOLDER / "long", marks=pytest.mark.slow)])
def test_in_a_process_of_their_own(folder, tmp_path):
    files = sorted(folder.glob("*.py"))
    assert files
    result = run_python("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
