"""
Measures what a step of ms_lossscale costs, compared to MindSpore's unscaled cell and to a step that a user would write
by hand with the same promises, in graph mode. With --all, it also compares to the recipe of MindSpore's tutorial,
measures PyNative mode, accumulation alone and the check alone, compares a ManualStep to that recipe, and a cell with
retries to the same cell without.

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

from base import measured_by
from common.options import positive_int
from common.output import markdown_table, replacing
from sides import BY_HAND, CASES, CHECK_ALONE
from tqdm import tqdm

SCRIPT = Path(__file__).with_name("sides.py")
QUICK = ["tiny", "unscaled", "lenet", "mlp", "deep_narrow", "resnet18", "dcgan"]
# In graph mode, it is the one without "_jit".
IN_PYNATIVE_MODE = "functional_jit"


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Measure what a step of ms_lossscale costs, as ratios of medians to MindSpore's unscaled cell."
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="output/bench", help="folder for the results (default: %(default)s)")
    add(
        "--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)} (default: {', '.join(QUICK)})"
    )
    add("--modes", nargs="+", choices=("graph", "pynative"), metavar="MODE", help="default: graph; with --all both")
    add("--all", action="store_true", help="all cases and modes, and more sides than MindSpore's and ms_lossscale's")
    add("--rounds", type=positive_int, default=7, metavar="N", help="rounds in each process (default: %(default)s)")
    args = parser.parse_args()
    cases = args.cases or (CASES if args.all else QUICK)
    pairs = itertools.product(cases, args.modes or ("graph", "pynative")[: 1 + args.all])
    args.pairs = [pair for pair in pairs if pair != (IN_PYNATIVE_MODE, "graph")]
    if not args.pairs:
        parser.error(f"{IN_PYNATIVE_MODE} needs --modes pynative")
    return args


def measure(case, mode, rounds, which):
    """Measures a case in one mode."""

    def run(side):
        return measured_by(SCRIPT, case, mode, rounds, which, side)[0]

    runs = [run(0)]
    sides = list(runs[0]["seconds"])
    runs += [run(i) for i in range(1, len(sides))]
    # Checks keep nothing, so there is no memory to measure.
    memory = {side: run(side)["peak"] for side in sides if case != "check" and side != CHECK_ALONE}
    return {"case": case, "mode": mode, "runs": runs, "memory": memory}


def row_of(result):
    """Returns the cells of a case: what a step of its first side costs, and the ratios of the others to it."""
    runs, memory, reference = result["runs"], result["memory"], next(iter(result["runs"][0]["seconds"]))
    seconds = {
        side: statistics.median(its for run in runs for its in run["seconds"][side]) for side in runs[0]["seconds"]
    }
    first_call = {side: statistics.median(run["first_call"][side] for run in runs) for side in seconds}
    shown = [result["case"], result["mode"], reference]
    for figures, its, *others in (
        (seconds, f"{1000 * seconds[reference]:.1f} ms", "ms_lossscale", BY_HAND, "recipe", CHECK_ALONE),
        (first_call, f"{first_call[reference]:.2f} s", "ms_lossscale", BY_HAND),
        (memory, f"{memory[reference] / 2**20:.0f} MiB" if memory else "-", "ms_lossscale", BY_HAND),
    ):
        shown += [its, *(f"{figures[side] / figures[reference]:.2f}" if side in figures else "-" for side in others)]
    return shown


HEADER = ["case", "mode", "compared to", "its step", "ms_lossscale", "by hand", "recipe", "check and unscale alone"]
HEADER += ["its first call", "ms_lossscale's", "by hand", "its peak memory", "ms_lossscale's", "by hand"]


def markdown(results):
    """Returns the table, without columns that are empty, and without modes and sides that are the same in all rows."""
    columns = list(zip(*map(row_of, results)))
    named = [i for i in range(1, 3) if len(results) == 1 or len(set(columns[i])) > 1]
    kept = [0, *named, *(i for i in range(3, len(HEADER)) if set(columns[i]) != {"-"})]
    return markdown_table([HEADER[i] for i in kept], list(zip(*(columns[i] for i in kept))), left=1 + len(named))


if __name__ == "__main__":
    args = parse_arguments()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    which = "all" if args.all else "few"
    results = [measure(*pair, args.rounds, which) for pair in tqdm(args.pairs, unit="case", dynamic_ncols=True)]
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    machine.update({name: version(name) for name in ("mindspore", "numpy")})
    for name, text in (
        ("bench.json", json.dumps({"machine": machine, "results": results}, indent=1)),
        ("bench.md", markdown(results)),
    ):
        with replacing(folder / name) as part:
            part.write_text(text)
    print(text, end="")
