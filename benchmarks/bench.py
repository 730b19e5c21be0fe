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
import sys
from importlib.metadata import version
from pathlib import Path

from base import measured_by, on_cpu, peak_memory, seconds_of, take_turns
from common.options import positive_int
from common.output import markdown_table, replacing
from tqdm import tqdm

CASES = ("tiny", "unscaled", "lenet", "mlp", "deep_narrow", "resnet18", "dcgan")
# With --all. Those with retries compare a cell with max_retries=3 to the same cell without.
MORE_CASES = ("accumulation", "check", "functional", "functional_jit")
MORE_CASES += ("lenet_retries", "mlp_retries", "resnet18_retries", "dcgan_retries")
MODES = ("graph", "pynative")
# In graph mode, it is the one without "_jit".
CASE_IN_PYNATIVE_MODE = "functional_jit"
# They keep nothing, so there is no memory to measure.
CASE_WITHOUT_MEMORY, SIDE_WITHOUT_MEMORY = "check", "check and unscale"


def child(case, mode, all_sides, rounds, what):
    """Measures a case in this process, as JSON: the memory of the side `what`, or the times, with that number first."""
    on_cpu(mode)
    from sides import sides_of

    sides = sides_of(case, mode, all_sides == "True")
    if what in sides:
        before, step = peak_memory(), sides[what]()
        seconds_of(step, 10)
        print(json.dumps({"before": before, "peak": peak_memory()}))
    else:
        print(json.dumps(take_turns(sides, int(rounds), int(what))))


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Measure what a step of ms_lossscale costs, as ratios of medians to MindSpore's unscaled cell."
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="output/bench", help="folder for the results (default: %(default)s)")
    names = f"of {', '.join(CASES)} and, with --all, {', '.join(MORE_CASES)} (default: all of them)"
    add("--cases", nargs="+", choices=CASES + MORE_CASES, metavar="CASE", help=names)
    add("--modes", nargs="+", choices=MODES, metavar="MODE", help="of graph, pynative (default: graph; --all: both)")
    add("--all", action="store_true", help="all cases and modes, and more sides than MindSpore's and ms_lossscale's")
    add("--rounds", type=positive_int, default=7, metavar="N", help="rounds in each process (default: %(default)s)")
    args = parser.parse_args()
    cases = args.cases or (CASES + MORE_CASES if args.all else CASES)
    modes = args.modes or (MODES if args.all else MODES[:1])
    args.pairs = [(case, mode) for case in cases for mode in modes if (case, mode) != (CASE_IN_PYNATIVE_MODE, "graph")]
    if not args.pairs:
        parser.error(f"{CASE_IN_PYNATIVE_MODE} needs --modes pynative")
    return args


def measure(case, mode, rounds, all_sides):
    """Measures a case in one mode."""

    def run(what):
        return measured_by(__file__, "--child", case, mode, all_sides, rounds, what)[0]

    runs = [run(0)]
    sides = list(runs[0]["seconds"])
    runs += [run(i) for i in range(1, len(sides))]
    measured = {"case": case, "mode": mode, "runs": runs}
    if case != CASE_WITHOUT_MEMORY:
        measured["memory"] = {side: run(side) for side in sides if side != SIDE_WITHOUT_MEMORY}
    return measured


def machine():
    """Returns what the figures depend on."""
    versions = {name: version(name) for name in ("mindspore", "numpy")}
    return {"cores": os.cpu_count(), "python": platform.python_version(), **versions}


def row_of(result):
    """Returns the cells of a case: what a step of its first side costs, and the ratios of the others to it."""
    runs, sides = result["runs"], list(result["runs"][0]["seconds"])
    step = {side: statistics.median(itertools.chain(*(run["seconds"][side] for run in runs))) for side in sides}
    first_call = {side: statistics.median(run["first_call"][side] for run in runs) for side in sides}
    memory = {side: its["peak"] for side, its in result.get("memory", {}).items()}
    reference = sides[0]

    shown = [result["case"], result["mode"], reference]
    for figures, its, *others in (
        (step, f"{1000 * step[reference]:.1f} ms", "ms_lossscale", "by hand", "recipe", SIDE_WITHOUT_MEMORY),
        (first_call, f"{first_call[reference]:.2f} s", "ms_lossscale", "by hand"),
        (memory, f"{memory[reference] / 2**20:.0f} MiB" if memory else "-", "ms_lossscale", "by hand"),
    ):
        shown += [its, *(f"{figures[side] / figures[reference]:.2f}" if side in figures else "-" for side in others)]
    return shown


HEADER = ["case", "mode", "compared to", "its step", "ms_lossscale", "by hand", "recipe", "check and unscale alone"]
HEADER += ["its first call", "ms_lossscale's", "by hand", "its peak memory", "ms_lossscale's", "by hand"]


def markdown(results):
    """Returns the table, without columns that are empty, and without modes and sides that are the same in all rows."""
    rows = [row_of(result) for result in results]
    columns = [[row[i] for row in rows] for i in range(len(HEADER))]
    named = [i for i in range(1, 3) if len(rows) == 1 or len(set(columns[i])) > 1]
    kept = [0, *named, *(i for i in range(3, len(HEADER)) if set(columns[i]) != {"-"})]
    header, *rows = ([line[i] for i in kept] for line in (HEADER, *rows))
    return markdown_table(header, rows, left=1 + len(named))


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    args = parse_arguments()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    results = [measure(*pair, args.rounds, args.all) for pair in tqdm(args.pairs, unit="case", dynamic_ncols=True)]
    table = markdown(results)
    with replacing(folder / "bench.json") as part:
        part.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    with replacing(folder / "bench.md") as part:
        part.write_text(table)
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
