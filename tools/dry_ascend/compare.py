"""
Makes the same steps on MindSpore's CPU backend and on the pretended NPU, where NumPy computes, and compares verdicts,
scales and losses. The scale begins at 2**20, so that the first steps overflow, and grows after two good ones.

    python tools/dry_ascend/compare.py                       # every cell of tools/dry/names.py
    python tools/dry_ascend/compare.py scaled "simultaneous with max_retries=3" --saturation --mode pynative

Exit status: 0, 1 if a verdict or a scale differs, 2 if MindSpore 2.10 or a compiler is missing.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import build
import run
from dry import names, processes

STEPS = Path(__file__).resolve().parent / "steps.py"
# Flags and numbers from here on are compared as they are: verdicts and scales. Smaller numbers are losses.
LEAST_SCALE = 64


def outputs(cells, args, environment):
    """Yields each cell with the numbers that each of its steps returns."""
    command = [STEPS, "--mode", args.mode, "--optimizer", args.optimizer, "--steps", args.steps]
    command += ["--scale", 2.0**20, "--window", 2]
    for cell, its in processes.one_by_one(command, cells, environment):
        yield cell, [flat(step["output"]) for step in its["steps"]] if "steps" in its else its["error"]


def flat(value):
    return [each for item in value for each in flat(item)] if isinstance(value, list) else [value]


def differences(on_cpu, on_npu):
    """Returns the first verdict or scale that differs, as text, perhaps empty; and the largest difference of losses."""
    largest = 0.0
    for i, (cpu, npu) in enumerate(zip(on_cpu, on_npu)):
        for expected, found in zip(cpu, npu):
            if isinstance(expected, bool) or abs(expected) >= LEAST_SCALE:
                if expected != found:
                    return f"step {i}: {cpu} on CPU, {npu} on the NPU", largest
            else:
                largest = max(largest, abs(expected - found) / max(1, abs(expected)))
    return "", largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("cells", nargs="*", default=names.CELLS, metavar="CELL", help="default: all of this package")
    add("--mode", choices=("graph", "pynative"), default="graph", help="default: %(default)s")
    add("--saturation", action="store_true", help="saturation mode, and not inf-nan mode")
    add("--optimizer", default="momentum", help="of tools/dry/cells.py (default: %(default)s)")
    add("--steps", type=int, default=8, help="default: %(default)s")
    args = parser.parse_args()
    build.folder()
    on_cpu = outputs(args.cells, args, processes.environment())
    on_npu = outputs(args.cells, args, run.environment(saturation=args.saturation, numpy=True))
    differ = 0
    for (cell, cpu), (_, npu) in zip(on_cpu, on_npu):
        failed = [each for each in (cpu, npu) if isinstance(each, str)]
        why, largest = (failed[0], 0.0) if failed else differences(cpu, npu)
        differ += bool(why)
        said = f"DIFFERENT: {why}" if why else f"same verdicts and scales; losses differ by {largest:.1e} at most"
        print(f"{cell}: {said}", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
