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

from base import measured_by, table
from sides import CASES, CHECK_ALONE, RECIPE, SCRIPT, STOCK_SCALED
from tqdm import tqdm

# MindSpore's names of the phases that take long, and what they do.
PHASES = {"type_inference": "parse and infer", "optimize": "optimize", "task_emit": "build kernels"}
# The phases after which nodes are counted: those that apply an operator or a function, without constants and inputs.
COUNTED = ("type_inference", "inline", "optimize", "validate")
PARSED = ("functions of ms_lossscale parsed", "others")
RECORD = re.compile(r":(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{3}\.\d{3}) .*Status record: (start|end) (\w+) action")
NODES = re.compile(r"Total number of cnodes: (\d+)")
# A line of the final graphs, and the nodes in them that only pass values on.
DEFINITION = re.compile(r"^ *%\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(", re.M)
LEFT_OUT = (RECIPE, CHECK_ALONE)
WIRING = {"Depend", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}


def timed(device, case, side):
    """Returns the row of a side: the seconds of each phase, summed over all compiled graphs."""
    result, log = measured_by(SCRIPT, device, case, "graph", 0, side, GLOG_v="1")
    seconds = Counter()
    for time, event, phase in RECORD.findall(log):
        time = datetime.strptime(time.replace(".", ""), "%Y-%m-%d-%H:%M:%S%f").timestamp()
        seconds[phase] += time if event == "end" else -time
    figures = {name: seconds[phase] for phase, name in PHASES.items()}
    figures = {"first call": result["seconds"], **figures, "the rest": result["seconds"] - sum(figures.values())}
    row = {name: f"{each:.2f} s" for name, each in figures.items()}
    return {**row, **dict(zip(PARSED, result["parsed"])), "peak memory": f"{result['first_peak'] >> 20} MiB"}


def counted(device, case, side):
    """Returns the functions that were parsed, the nodes after each phase, and the operators that are left."""
    with tempfile.TemporaryDirectory() as folder:
        saving = {"MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS_PATH": folder}
        result, _ = measured_by(SCRIPT, device, case, "graph", 0, side, **saving)

        def graphs(pattern):
            return "".join(path.read_text(encoding="utf-8") for path in Path(folder).rglob(f"{pattern}.ir"))

        row = dict(zip(PARSED, result["parsed"]))
        for phase in COUNTED:
            row[f"nodes after {phase}"] = sum(map(int, NODES.findall(graphs(f"[0-9]*_{phase}_[0-9]*"))))
        return {**row, "operators": sum(name not in WIRING for name in DEFINITION.findall(graphs("graph_build_*")))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show where the time of a first call in graph mode goes.")
    parser.add_argument("--nodes", action="store_true", help="count nodes of graphs instead of seconds")
    parser.add_argument("--device", choices=("CPU", "GPU", "Ascend"), default="CPU", help="default: %(default)s")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: lenet resnet18)")
    args = parser.parse_args()
    cases = args.cases or ["lenet", "resnet18"]
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}. There are {', '.join(CASES)}.")
    left_out = (*LEFT_OUT, STOCK_SCALED) if args.device == "CPU" else LEFT_OUT
    pairs = [(case, side) for case in cases for side in CASES[case][1] if side not in left_out]
    measure = counted if args.nodes else timed
    rows = [
        {"case": case, "side": side, **measure(args.device, case, side)} for case, side in tqdm(pairs, unit="process")
    ]
    print(table(rows, left=2), end="")
