"""
Shows where the time of a first call in graph mode goes: MindSpore's phases of compilation, and the number of Python
functions that it parses. It compares ms_lossscale's cell to MindSpore's unscaled one, or what else a case has.

    python benchmarks/first_call.py [--nodes] [CASE ...]

Each side runs in a process of its own. Writing MindSpore's log makes it some tenths slower than in `bench.py`. Prints a
table in GitHub's Markdown. With `--nodes` it counts instead, which other work on the machine does not change: functions
that are parsed, nodes of the graphs after each phase, and operators that are left, in all branches.
"""

import argparse
import re
import tempfile
from collections import Counter
from datetime import datetime
from pathlib import Path

from base import measured_by
from common.output import markdown_table
from tqdm import tqdm

SCRIPT = Path(__file__).with_name("sides.py")
# MindSpore's names of the phases that take long, and what they do.
PHASES = {"type_inference": "parse and infer", "optimize": "optimize", "task_emit": "build kernels"}
# The phases after which nodes are counted: those that apply an operator or a function, without constants and inputs.
COUNTED = {
    "type_inference": "type inference",
    "inline": "inlining",
    "optimize": "optimization",
    "validate": "validation",
}
RECORD = re.compile(r":(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{3}\.\d{3}) .*Status record: (start|end) (\w+) action")
NODES = re.compile(r"Total number of cnodes: (\d+)")
# A line of the final graphs, and the nodes in them that only pass values on.
DEFINITION = re.compile(r"^ *%\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(", re.M)
WIRING = {"Depend", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}


def timed(case, side):
    """Returns the cells of a side: the seconds of each phase, summed over all compiled graphs."""
    result, log = measured_by(SCRIPT, case, "graph", 0, "all", side, GLOG_v="1")
    seconds = Counter()
    for time, event, phase in RECORD.findall(log):
        time = datetime.strptime(time.replace(".", ""), "%Y-%m-%d-%H:%M:%S%f").timestamp()
        seconds[phase] += time if event == "end" else -time
    figures = [result["seconds"], *(seconds[phase] for phase in PHASES)]
    figures.append(result["seconds"] - sum(figures[1:]))
    return [*(f"{each:.2f} s" for each in figures), *result["parsed"], f"{result['first_peak'] >> 20} MiB"]


def counted(case, side):
    """Returns the functions that were parsed, the nodes after each phase, and the operators that are left."""
    with tempfile.TemporaryDirectory() as folder:
        saving = {"MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS_PATH": folder}
        result, _ = measured_by(SCRIPT, case, "graph", 0, "all", side, **saving)

        def graphs(pattern):
            return "".join(path.read_text(encoding="utf-8") for path in Path(folder).rglob(f"{pattern}.ir"))

        nodes = {phase: sum(map(int, NODES.findall(graphs(f"[0-9]*_{phase}_[0-9]*")))) for phase in COUNTED}
        operators = sum(name not in WIRING for name in DEFINITION.findall(graphs("graph_build_*")))
    return {**result, "nodes": nodes, "operators": operators}


def main():
    from sides import BY_HAND, CASES, sides_of

    parser = argparse.ArgumentParser(description="Show where the time of a first call in graph mode goes.")
    parser.add_argument("--nodes", action="store_true", help="count nodes of graphs instead of seconds")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: lenet resnet18)")
    arguments = parser.parse_args()
    cases = arguments.cases or ["lenet", "resnet18"]
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}. There are {', '.join(CASES)}.")
    parsed = ["functions of ms_lossscale parsed", "others"]
    header = ["case", "side", "first call", *PHASES.values(), "the rest", *parsed, "peak memory"]
    if arguments.nodes:
        header = ["case", "side", *parsed, *(f"nodes after {phase}" for phase in COUNTED.values()), "operators"]
    rows = []
    # Of one network, also the cell without a loss scale.
    pairs = [(case, side) for case in cases for side in sides_of(case)]
    pairs += [(case, "loss_scale=None") for case in cases if BY_HAND in CASES[case]]
    for case, side in tqdm(sorted(pairs, key=lambda pair: cases.index(pair[0])), unit="process"):
        if arguments.nodes:
            its = counted(case, side)
            rows.append([case, side, *its["parsed"], *its["nodes"].values(), its["operators"]])
        else:
            rows.append([case, side, *timed(case, side)])
    print(markdown_table(header, [list(map(str, row)) for row in rows], left=2), end="")


if __name__ == "__main__":
    main()
