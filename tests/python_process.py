"""Python in a new process, as a user starts it: with the package, and nothing of this process' `sys.path`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments, cwd):
    """Runs `python *arguments` in the folder `cwd`; the result has `returncode`, `stdout` and `stderr`."""
    # MindSpore's O1 and O2 put its folders, with their own math.py, on sys.path, which is therefore not handed on.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def check_python(*arguments, cwd):
    """`run_python`, which must succeed; returns what was printed."""
    result = run_python(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
