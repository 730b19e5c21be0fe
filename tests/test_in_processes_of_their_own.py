"""
Tests that leave MindSpore in another state, or need it untouched, each file of them in a process of its own.

After compilations that failed, PyNative mode refuses integers as indices, and graph mode fails to differentiate.
"""

from pathlib import Path

import pytest
from support.python_process import run_python

FILES = sorted((Path(__file__).parent / "own_process").glob("*.py"))


def test_there_are_some():
    assert len(FILES) == 6


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_in_a_process_of_its_own(path, tmp_path):
    result = run_python("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", path, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
