"""
Measures what a step of ms_lossscale costs, compared to MindSpore's unscaled cell and to a step that a user would write
by hand with the same promises, in graph mode. With --all, it also compares to the recipe of MindSpore's tutorial,
measures PyNative mode, accumulation alone and the check alone, compares a ManualStep to that recipe, and a cell with
retries to the same cell without, and measures batches of new shapes and several steps with one call.

    python benchmarks/bench.py [--all]

The sides of a case take turns in one process. There are as many such processes as sides, and each builds another side
first, since the first is at an advantage. Memory is measured in one process for each side. Prints a table in GitHub's
Markdown, and writes it and all measurements to the output folder, see --output.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path

from base import measured_by, measured_in_turns, table
from common.options import positive_int
from common.output import replacing
from sides import CASES, CHECK_ALONE, RECIPE, SCRIPT, UNSCALED
from tqdm import tqdm

QUICK = ["tiny", "unscaled", "lenet", "mlp", "deep_narrow", "resnet18", "dcgan"]


def measure(case, mode, rounds, every_side):
    """Measures a case in one mode."""
    # In PyNative mode, the check alone would run operator by operator, unlike the cell.
    left_out = {UNSCALED: True, RECIPE: not every_side, CHECK_ALONE: not every_side or mode != "graph"}
    sides = [side for side in CASES[case][1] if not left_out.get(side)]
    runs = measured_in_turns(SCRIPT, case, mode, rounds, sides=sides)
    # The check alone keeps nothing, so there is no memory to measure.
    memory = {side: measured_by(SCRIPT, case, mode, 0, side)[0]["peak"] for side in sides if side != CHECK_ALONE}
    return {"case": case, "mode": mode, "runs": runs, "memory": memory}


def row_of(result):
    """Returns the row of a case: what its first side costs, and the ratios of the others to it."""
    runs, sides = result["runs"], list(result["runs"][0]["seconds"])
    row = {"case": result["case"], "mode": result["mode"], "compared to": sides[0]}
    steps = {side: statistics.median(each for run in runs for each in run["seconds"][side]) for side in sides}
    first_calls = {side: statistics.median(run["first_call"][side] for run in runs) for side in sides}
    row.update(columns("step", steps, f"{1000 * steps[sides[0]]:.1f} ms"))
    row.update(columns("first call", first_calls, f"{first_calls[sides[0]]:.2f} s"))
    return {**row, **columns("peak memory", result["memory"], f"{result['memory'][sides[0]] >> 20} MiB")}


def columns(what, figures, written):
    """Returns the first side's figure as it is written, and the ratios of the others to it."""
    (_, reference), *others = figures.items()
    return {f"its {what}": written, **{f"{what}: {side}": f"{figure / reference:.2f}" for side, figure in others}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what a step costs, as ratios to MindSpore's unscaled cell.")
    add, names, modes = parser.add_argument, ", ".join(CASES), ("graph", "pynative")
    add("--output", metavar="DIR", type=Path, default="output/bench", help="folder for results (default: %(default)s)")
    add("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {names} (default: {', '.join(QUICK)})")
    add("--modes", nargs="+", choices=modes, metavar="MODE", help="default: graph; with --all both")
    add("--all", action="store_true", help="all cases and modes, and more sides than MindSpore's and ms_lossscale's")
    add("--rounds", type=positive_int, default=7, metavar="N", help="rounds in each process (default: %(default)s)")
    args = parser.parse_args()
    cases, modes = args.cases or (CASES if args.all else QUICK), args.modes or modes[: 1 + args.all]
    args.output.mkdir(parents=True, exist_ok=True)
    pairs = tqdm(list(itertools.product(cases, modes)), unit="case", dynamic_ncols=True)
    results = [measure(*pair, args.rounds, args.all) for pair in pairs]
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    machine.update({name: version(name) for name in ("mindspore", "numpy")})
    text, measured = table(list(map(row_of, results)), left=3), {"machine": machine, "results": results}
    for name, content in (("bench.json", json.dumps(measured, indent=1)), ("bench.md", text)):
        with replacing(args.output / name) as part:
            part.write_text(content)
    print(text, end="")
