"""
Measures what a step of ms_lossscale costs, against MindSpore's unscaled cell and against a hand-written recipe.

    python benchmarks/bench.py

Each case runs in a process of its own, in which the sides take turns; memory is measured in one process for each side.
Prints a table in GitHub's Markdown, and writes it and all that was measured to the output folder, see --output.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent / "examples"))

from lenet.history import replacing  # noqa: E402
from lenet.options import positive_int  # noqa: E402

CASES = ("lenet", "mlp", "deep_narrow", "resnet18", "dcgan", "accumulation", "check")
MODES = ("graph", "pynative")
# The check keeps nothing, so that there is no memory to measure.
WITHOUT_MEMORY = ("check",)


def make_parser():
    parser = argparse.ArgumentParser(
        description="Measure what a step of ms_lossscale costs, as ratios of medians to MindSpore's unscaled cell."
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="output/bench", help="folder for the results (default: %(default)s)")
    add(
        "--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=f"of {', '.join(CASES)} (default: all)"
    )
    add("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help="of graph, pynative (default: both)")
    add("--rounds", type=positive_int, default=15, metavar="N", help="rounds of each side (default: %(default)s)")
    return parser


def run(*arguments):
    """What `measure.py` has measured."""
    command = [sys.executable, str(FOLDER / "measure.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def measure(case, mode, rounds):
    """Everything about a case in one mode."""
    measured = run(case, mode, "--rounds", rounds)
    if case not in WITHOUT_MEMORY:
        measured["memory"] = {side: run(case, mode, "--memory", side) for side in measured["seconds"]}
    return {"case": case, "mode": mode, **measured}


def machine():
    """What the figures depend on."""
    cpu = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu.group(1) if cpu else "unknown",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2"),
        **{name: version(name) for name in ("mindspore", "numpy")},
    }


def markdown(results):
    """The table: for each case the first side's step, and the other sides' ratios to it."""
    header = ["case", "mode", "compared to", "its step", "side", "step", "first call", "peak memory"]
    lines = [header, ["---"] * 3 + ["---:", "---"] + ["---:"] * 3]
    for result in results:
        medians = {side: statistics.median(seconds) for side, seconds in result["seconds"].items()}
        reference, *sides = medians
        for side in sides:
            memory = "-"
            if "memory" in result:
                memory = f"{result['memory'][side]['peak'] / result['memory'][reference]['peak']:.2f}"
            first_call = result["first_call"][side] / result["first_call"][reference]
            lines.append(
                [
                    result["case"],
                    result["mode"],
                    reference,
                    f"{1000 * medians[reference]:.2f} ms",
                    side,
                    f"{medians[side] / medians[reference]:.3f}",
                    f"{first_call:.2f}",
                    memory,
                ]
            )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main():
    args = make_parser().parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    pairs = [(case, mode) for case in args.cases for mode in args.modes]
    for case, mode in tqdm(pairs, unit="case", dynamic_ncols=True):
        results.append(measure(case, mode, args.rounds))
    table = markdown(results)
    with replacing(folder / "bench.json") as part:
        part.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    with replacing(folder / "bench.md") as part:
        part.write_text(table)
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
