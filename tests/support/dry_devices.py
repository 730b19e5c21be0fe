"""What the programs of tools/ print and count."""

import functools
import json
import tempfile
from pathlib import Path

import pytest

from support.python_process import ROOT, run_python

# The exit status of a program that can build nothing here, after it has said why.
CANNOT = 2


def run_tool(name, *arguments):
    """Returns the result of a program of tools/; skips the test where nothing can be built."""
    with tempfile.TemporaryDirectory() as folder:
        result = run_python(ROOT / "tools" / name, *arguments, cwd=folder, timeout=600)
    last = (result.stderr.splitlines() or [""])[-1]
    if result.returncode == CANNOT and last.startswith("tools/"):
        pytest.skip(last)
    return result


def counted(name, *arguments):
    """Returns what a program of tools/ counts, which it does once for all tests."""
    found = _counted(name, *arguments)
    assert type(found) is dict, found
    return found


@functools.cache
def _counted(name, *arguments):
    # What a program says instead is kept, too: a program that fails is not run again.
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "counted.json"
        result = run_tool(name, *arguments, "--json", written)
        return json.loads(written.read_text()) if written.exists() else result.stderr[-3000:]
