"""Processes in which a pretended device runs, and which may crash."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
ROOT = TOOLS.parent


def environment(checkout=ROOT):
    """Returns the environment of a Python that finds ms_lossscale and its benchmarks in a checkout, and these tools."""
    checkout = Path(checkout).resolve()
    paths = [
        TOOLS,
        checkout,
        checkout / "benchmarks",
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    # With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower.
    return {"ONEDNN_MAX_CPU_ISA": "AVX2", **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def one_by_one(arguments, names, environment):
    """
    Runs Python with these arguments and then names, for each of which it prints a line of JSON. Yields each name with
    what was printed. If the process ends too early, yields {"error": why} of the name whose turn it was, and goes on
    with the rest.
    """
    names = list(names)
    while names:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            command = [sys.executable, *map(str, arguments), *names]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            with process:
                for line in process.stdout:
                    if line.startswith("{"):
                        yield names.pop(0), json.loads(line)
            errors.seek(0)
            said = errors.read()
        if process.returncode and names:
            yield names.pop(0), {"error": reason(process.returncode, said)}
        elif names:
            raise RuntimeError(f"{' '.join(command)} printed nothing of {names[0]}:\n{said[-2000:]}")


def reason(status, said):
    """Returns in a line why a process ended with this status."""
    if status < 0:
        return f"crashed: {signal.Signals(-status).name}"
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("[")]
    raised = [line for line in lines if "Error: " in line]
    return (raised or lines or [f"exit status {status}"])[-1]
