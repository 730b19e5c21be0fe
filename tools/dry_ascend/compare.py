"""
Runs cells on MindSpore's CPU backend and on the pretended NPU, where NumPy computes, and compares verdicts, scales and losses:

    python compare.py CELL [CELL ...] [--mode pynative] [--saturation] [--optimizer adam] [--steps 8] [--verbose]

The scale begins at 2**20, so that the first steps overflow, and grows after two good ones. Exit status 1 if one differs.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import run

STEPS = Path(__file__).resolve().parent / "steps.py"
# Values are compared as they are from here on: scales. Smaller ones are losses.
LEAST_SCALE = 64
LOUD = {"DRY_SCALE": os.environ.get("DRY_SCALE", str(2**20)), "DRY_WINDOW": os.environ.get("DRY_WINDOW", "2")}


def flat(values):
    return [each for value in values for each in (flat(value) if isinstance(value, list) else [value])]


def lines_of(command, env):
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=200
        )
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if "Error" in line or line.startswith("dry_ascend")]
    return [json.loads(line)["output"] for line in done.stdout.splitlines() if line.startswith('{"step"')], said[-1:]


@functools.cache
def on_cpu(cell, mode, optimizer, steps):
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", **LOUD}
    return lines_of(command(cell, mode, optimizer, steps), env)[0]


def command(cell, mode, optimizer, steps):
    return [str(STEPS), cell, "--mode", mode, "--optimizer", optimizer, "--steps", str(steps)]


def compare(cell, mode, saturation, optimizer, steps, verbose=False, soc="Ascend910B2"):
    """Returns whether all agrees, the largest difference of losses, and a text about the first that differs."""
    its, cpu = command(cell, mode, optimizer, steps), on_cpu(cell, mode, optimizer, steps)
    with tempfile.TemporaryDirectory() as folder:
        unknown = Path(folder) / "unknown"
        npu, said = lines_of(its, {**run.environment(soc, saturation, numpy=True, unknown=unknown), **LOUD})
        if unknown.exists():
            return False, 0.0, f"NumPy's kernels lack {', '.join(sorted(set(unknown.read_text().split())))}"
    if verbose:
        for a, b in zip(cpu, npu):
            print(f"CPU {a}\nNPU {b}")
    if len(cpu) != steps or len(npu) != steps:
        return False, 0.0, f"{len(cpu)} steps on CPU, {len(npu)} on the NPU, of {steps}: {' '.join(said)[:200]}"
    largest = 0.0
    for i, (a, b) in enumerate(zip(cpu, npu)):
        for x, y in zip(flat(a), flat(b)):
            if isinstance(x, bool) or abs(x) >= LEAST_SCALE:
                if x != y:
                    return False, largest, f"step {i}: CPU {a}, NPU {b}"
            else:
                largest = max(largest, abs(x - y) / max(1, abs(x)))
    return True, largest, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    parser.add_argument("--saturation", action="store_true")
    parser.add_argument("--optimizer", default="momentum")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--verbose", action="store_true")
    args = vars(parser.parse_args())
    different = 0
    for cell in args.pop("cells"):
        same, largest, why = compare(cell, **args)
        different += not same
        print(
            f"{cell}: {'same verdicts and scales' if same else 'DIFFERENT'}; losses differ by {largest:.1e} at most. {why}",
            flush=True,
        )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
