"""
Measures how a step, a first call and memory grow with the number of tensors and with that of values, MindSpore's
unscaled cell beside ms_lossscale's, in graph mode.

    python benchmarks/growth.py [--cases CASE ...]

Prints a table in GitHub's Markdown, and writes it and all that was measured to the output folder, see --output.
"""

import argparse
import sys

import before_mindspore  # noqa: F401
from bench import figures, measure_all
from common.options import positive_int
from common.output import markdown_table

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


def markdown(results):
    """The table: step, first call and peak memory, of both sides each."""
    header = ["", "step, stock", "ms_lossscale", "first call, stock", "ms_lossscale", "memory, stock", "ms_lossscale"]
    rows = []
    for result in results:
        step, first_call, memory = figures(result)
        row = [result["case"], *(f"{1000 * seconds:.2f} ms" for seconds in step.values())]
        row += [f"{seconds:.2f} s" for seconds in first_call.values()]
        rows.append(row + [f"{size / 2**20:.0f} MiB" for size in memory.values()])
    return markdown_table(header, rows)


def main():
    args = make_parser().parse_args()
    measure_all(args.output, "growth", [(case, "graph", args.rounds, False) for case in args.cases], markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
