"""
Measures what a step of ms_lossscale costs, compared to MindSpore's unscaled cell and to a step that a user would write
by hand with the same promises, in graph mode. With --all, it also compares to the recipe of MindSpore's tutorial,
measures PyNative mode, accumulation alone and the check alone, compares a ManualStep to that recipe, and a cell with
retries to the same cell without, and measures batches of new shapes and several steps with one call.

    python benchmarks/bench.py [--all] [--device GPU [--torch python3]]

On a GPU or NPU it compares large networks in float16, also to MindSpore's own cell with loss scaling, which CPU
refuses; and where PyTorch finds a GPU, it measures what torch.amp.GradScaler costs there.

The sides of a case take turns in one process. There are as many such processes as sides, and each builds another side
first, since the first is at an advantage. Memory is the device's; on CPU it is measured in one process for each side.
Prints a table in GitHub's Markdown, and writes it and all measurements to the output folder, see --output.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

from base import measured_by, measured_in_turns, table
from common.options import positive_int
from common.output import replacing
from sides import CASES, CHECK_ALONE, RECIPE, RETRIED, SCRIPT, SMALL, STOCK_SCALED, UNSCALED
from tqdm import tqdm

QUICK = ["tiny", "unscaled", "lenet", "mlp", "deep_narrow", "resnet18", "dcgan"]
LARGE = ["tiny", "mlp", "resnet50", "transformer", "dcgan128"]
TORCH = Path(__file__).with_name("torch_sides.py")


def measure(case, mode, args):
    """Measures a case in one mode."""
    # In PyNative mode, the check alone would run operator by operator, unlike the cell.
    left_out = {CHECK_ALONE: not args.all or mode != "graph", RECIPE: not args.all, RETRIED: not args.all}
    on_cpu = args.device == "CPU"
    left_out.update({STOCK_SCALED: on_cpu, UNSCALED: on_cpu and case not in SMALL})
    sides = [side for side in CASES[case][1] if not left_out.get(side)]
    runs = measured_in_turns(SCRIPT, args.device, case, mode, args.rounds, sides=sides, processes=args.processes)
    if on_cpu:
        # The check alone keeps nothing, so there is no memory to measure.
        memory = {
            side: measured_by(SCRIPT, args.device, case, mode, 0, side)[0]["peak"]
            for side in sides
            if side != CHECK_ALONE
        }
    else:
        memory = {side: statistics.median(run["memory"][side] for run in runs) for side in sides}
    return {"case": case, "mode": mode, "runs": runs, "memory": memory}


def measure_torch(case, args):
    """Measures the same network with PyTorch's GradScaler and without, in the Python of `--torch`."""
    run, _ = measured_by(TORCH, case, args.rounds, python=args.torch)
    return {"case": case, "mode": "PyTorch", "runs": [run], "memory": run["memory"]}


def row_of(result):
    """Returns the row of a case: what its first side costs, and the ratios of the others to it."""
    runs, sides = result["runs"], list(result["runs"][0]["seconds"])
    row = {"case": result["case"], "mode": result["mode"], "compared to": sides[0]}
    steps = {side: statistics.median(each for run in runs for each in run["seconds"][side]) for side in sides}
    first_calls = {side: statistics.median(run["first_call"][side] for run in runs) for side in sides}
    row.update(columns("step", steps, f"{1000 * steps[sides[0]]:.1f} ms"))
    row.update(columns("first call", first_calls, f"{first_calls[sides[0]]:.2f} s"))
    row.update(columns("peak memory", result["memory"], f"{result['memory'][sides[0]] / 2**20:.0f} MiB"))
    if skipped := [side for side in sides if any(run["skipped"][side] for run in runs)]:
        row["only skipped steps"] = ", ".join(skipped)
    return row


def columns(what, figures, written):
    """Returns the first side's figure as it is written, and the ratios of the others to it."""
    (_, reference), *others = figures.items()
    return {f"its {what}": written, **{f"{what}: {side}": f"{figure / reference:.2f}" for side, figure in others}}


def write(folder, results, failures):
    """Writes what was measured, and what failed, to files. Returns the table."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    machine.update({name: version(name) for name in ("mindspore", "numpy")})
    text = table(list(map(row_of, results)), left=3) + "".join(f"\n{failure}\n" for failure in failures)
    measured = {"machine": machine, "results": results, "failures": failures}
    for name, content in (("bench.json", json.dumps(measured, indent=1)), ("bench.md", text)):
        with replacing(folder / name) as part:
            part.write_text(content)
    return text


def main():
    parser = argparse.ArgumentParser(description="Measure what a step costs, as ratios to MindSpore's unscaled cell.")
    add, names, modes = parser.add_argument, ", ".join(CASES), ("graph", "pynative")
    add("--output", metavar="DIR", type=Path, default="output/bench", help="folder for results (default: %(default)s)")
    add("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {names}")
    add("--modes", nargs="+", choices=modes, metavar="MODE", help="default: graph; with --all both")
    add("--all", action="store_true", help="all cases and modes, and more sides than MindSpore's and ms_lossscale's")
    add("--rounds", type=positive_int, default=7, metavar="N", help="rounds in each process (default: %(default)s)")
    add("--processes", type=positive_int, metavar="N", help="of a case (default: as many as sides)")
    add("--device", choices=("CPU", "GPU", "Ascend"), default="CPU", help="default: %(default)s")
    add("--torch", metavar="PYTHON", help="a Python that has PyTorch with CUDA, to measure its GradScaler there, too")
    args = parser.parse_args()
    cases = args.cases or (CASES if args.all else QUICK if args.device == "CPU" else LARGE)
    measurements = []
    for case in cases:
        measurements += [partial(measure, case, mode, args) for mode in args.modes or modes[: 1 + args.all]]
        if args.torch and case in LARGE:
            measurements.append(partial(measure_torch, case, args))
    args.output.mkdir(parents=True, exist_ok=True)
    results, failures, text = [], [], ""
    for measurement in tqdm(measurements, unit="case", dynamic_ncols=True):
        try:
            results.append(measurement())
        except RuntimeError as error:
            failures.append(str(error))
        # What is measured is kept, whatever ends this program.
        text = write(args.output, results, failures)
    print(text, end="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
