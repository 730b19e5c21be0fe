"""
Measures how a step, a first call and memory grow with the number of tensors and with that of values, MindSpore's
unscaled cell beside ms_lossscale's, in graph mode.

    python benchmarks/growth.py [--cases CASE ...]

Prints a table in GitHub's Markdown, and writes it and all that was measured to the output folder, see --output.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

from bench import machine, measure
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from common.options import positive_int
from common.output import replacing

CASES = ("10 tensors", "100 tensors", "1000 tensors", "1e5 values", "1e6 values", "1e7 values", "1e8 values")


def make_parser():
    parser = argparse.ArgumentParser(description="Measure how costs grow with the number of tensors and of values.")
    parser.add_argument("--output", metavar="DIR", default="output/growth", help="folder (default: %(default)s)")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=CASES,
        metavar="CASE",
        help=f"of {', '.join(map(repr, CASES))} (default: all)",
    )
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="rounds (default: %(default)s)")
    return parser


def row(result):
    """Step, first call and peak memory of both sides."""
    cells = [result["case"]]
    stock, ours = result["runs"][0]["seconds"]
    for side in (stock, ours):
        step = statistics.median(itertools.chain(*(run["seconds"][side] for run in result["runs"])))
        cells.append(f"{1000 * step:.2f} ms")
    for side in (stock, ours):
        cells.append(f"{statistics.median(run['first_call'][side] for run in result['runs']):.2f} s")
    for side in (stock, ours):
        cells.append(f"{result['memory'][side]['peak'] / 2**20:.0f} MiB")
    return cells


def main():
    args = make_parser().parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    results = [measure(case, "graph", args.rounds, all_sides=False) for case in tqdm(args.cases, unit="case")]
    header = ["", "step, stock", "ms_lossscale", "first call, stock", "ms_lossscale", "memory, stock", "ms_lossscale"]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *map(row, results)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    with replacing(folder / "growth.json") as part:
        part.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    with replacing(folder / "growth.md") as part:
        part.write_text(table)
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
