"""
Tests that leave MindSpore in another state, or need it untouched, in a process of their own.

After compilations that failed, PyNative mode refuses integers as indices, and graph mode fails to differentiate.
"""

from pathlib import Path

from support.python_process import run_python

FILES = sorted((Path(__file__).parent / "own_process").glob("*.py"))


def test_in_a_process_of_their_own(tmp_path):
    assert FILES
    result = run_python("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *FILES, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
