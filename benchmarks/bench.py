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
import re
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

from before_mindspore import measured_by
from common.options import positive_int
from common.output import markdown_table, replacing
from tqdm import tqdm

MEASURE = Path(__file__).resolve().with_name("measure.py")

CASES = ("tiny", "unscaled", "lenet", "mlp", "deep_narrow", "resnet18", "dcgan")
# With --all. Those with retries compare a cell with max_retries=3 to the same cell without.
MORE_CASES = ("accumulation", "check", "functional", "functional_jit")
MORE_CASES += ("lenet_retries", "mlp_retries", "resnet18_retries", "dcgan_retries")
MODES = ("graph", "pynative")
# In graph mode, it is the one without "_jit".
CASE_IN_PYNATIVE_MODE = "functional_jit"
# They keep nothing, so there is no memory to measure.
CASE_WITHOUT_MEMORY, SIDE_WITHOUT_MEMORY = "check", "check and unscale"


def make_parser():
    parser = argparse.ArgumentParser(
        description="Measure what a step of ms_lossscale costs, as ratios of medians to MindSpore's unscaled cell."
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="output/bench", help="folder for the results (default: %(default)s)")
    add(
        "--cases",
        nargs="+",
        choices=CASES + MORE_CASES,
        metavar="CASE",
        help=f"of {', '.join(CASES)} and, with --all, {', '.join(MORE_CASES)} (default: all of them)",
    )
    add("--modes", nargs="+", choices=MODES, metavar="MODE", help="of graph, pynative (default: graph; --all: both)")
    add("--all", action="store_true", help="all cases and modes, and more sides than MindSpore's and ms_lossscale's")
    add("--rounds", type=positive_int, default=7, metavar="N", help="rounds in each process (default: %(default)s)")
    return parser


def parse_arguments():
    parser = make_parser()
    args = parser.parse_args()
    cases = args.cases or (CASES + MORE_CASES if args.all else CASES)
    modes = args.modes or (MODES if args.all else MODES[:1])
    args.pairs = [(case, mode) for case in cases for mode in modes if (case, mode) != (CASE_IN_PYNATIVE_MODE, "graph")]
    if not args.pairs:
        parser.error(f"{CASE_IN_PYNATIVE_MODE} needs --modes pynative")
    return args


def run(*arguments):
    """Returns what `measure.py` has measured."""
    return measured_by(MEASURE, *arguments)[0]


def measure(case, mode, rounds, all_sides):
    """Measures a case in one mode."""
    options = ["--rounds", rounds, *([] if all_sides else ["--brief"])]
    runs = [run(case, mode, *options)]
    sides = list(runs[0]["seconds"])
    runs += [run(case, mode, *options, "--first", i) for i in range(1, len(sides))]
    measured = {"case": case, "mode": mode, "runs": runs}
    if case != CASE_WITHOUT_MEMORY:
        measured["memory"] = {side: run(case, mode, "--memory", side) for side in sides if side != SIDE_WITHOUT_MEMORY}
    return measured


def machine():
    """Returns what the figures depend on."""
    cpu = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu.group(1) if cpu else "unknown",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ONEDNN_MAX_CPU_ISA": os.environ["ONEDNN_MAX_CPU_ISA"],
        **{name: version(name) for name in ("mindspore", "numpy")},
    }


def figures(result):
    """Returns for each side the median seconds of a step and of its first call, and the peak memory in bytes."""
    runs, step, first_call = result["runs"], {}, {}
    for side in runs[0]["seconds"]:
        step[side] = statistics.median(itertools.chain(*(run["seconds"][side] for run in runs)))
        first_call[side] = statistics.median(run["first_call"][side] for run in runs)
    return step, first_call, {side: measured["peak"] for side, measured in result.get("memory", {}).items()}


def markdown(results):
    """
    Returns the table. For each case it has a step of the side that the others are compared to, and their ratios to it.
    Columns without measurements are left out, and modes and sides that are the same in all rows.
    """
    header = ["case", "mode", "compared to", "its step", "ms_lossscale", "by hand", "recipe", "check and unscale alone"]
    header += ["its first call", "ms_lossscale's", "by hand"]
    header += ["its peak memory", "ms_lossscale's", "by hand"]
    rows = []
    for result in results:
        step, first_call, memory = figures(result)
        reference = next(iter(step))
        line = [result["case"], result["mode"], reference, f"{1000 * step[reference]:.1f} ms"]
        line += [_ratio(step, side, reference) for side in ("ms_lossscale", "by hand", "recipe", SIDE_WITHOUT_MEMORY)]
        line += [f"{first_call[reference]:.2f} s"]
        line += [_ratio(first_call, side, reference) for side in ("ms_lossscale", "by hand")]
        line += [f"{memory[reference] / 2**20:.0f} MiB" if memory else "-"]
        line += [_ratio(memory, side, reference) for side in ("ms_lossscale", "by hand")]
        rows.append(line)
    columns = [[row[i] for row in rows] for i in range(len(header))]
    named = [i for i in range(1, 3) if len(rows) == 1 or len(set(columns[i])) > 1]
    kept = [0, *named, *(i for i in range(3, len(header)) if set(columns[i]) != {"-"})]
    header, *rows = ([line[i] for i in kept] for line in (header, *rows))
    return markdown_table(header, rows, left=1 + len(named))


def _ratio(figures, side, reference):
    return f"{figures[side] / figures[reference]:.2f}" if side in figures else "-"


def main():
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
