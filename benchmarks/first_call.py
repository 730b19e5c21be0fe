"""
Shows where the time of a first call in graph mode goes: MindSpore's phases of compilation, and the number of Python
functions that it parses. It compares ms_lossscale's cell to MindSpore's unscaled one, or what else a case has.

    python benchmarks/first_call.py [--nodes] [CASE ...]

Each side runs in a process of its own. Writing MindSpore's log makes it some tenths slower than in `bench.py`. Prints a
table in GitHub's Markdown. With `--nodes` it counts instead, which other work on the machine does not change: functions
that are parsed, nodes of the graphs after each phase, and operators that are left, in all branches.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from datetime import datetime
from pathlib import Path

from base import measured_by, on_cpu, peak_memory, seconds_of
from common.output import markdown_table
from tqdm import tqdm

# MindSpore's names of the phases that take long, and what they do.
PHASES = {"type_inference": "parse and infer", "optimize": "optimize", "task_emit": "build kernels"}
# The phases after which nodes are counted: those that apply an operator or a function, without constants and inputs.
COUNTED = {
    "type_inference": "type inference",
    "inline": "inlining",
    "optimize": "optimization",
    "validate": "validation",
}

_RECORD = re.compile(r":(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{3}\.\d{3}) .*Status record: (start|end) (\w+) action")
_NODES = re.compile(r"Total number of cnodes: (\d+)")
# A line of the final graphs, and the nodes in them that only pass values on.
_DEFINITION = re.compile(r"^ *%\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(", re.M)
_WIRING = {"Depend", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}


def child(case, side):
    """Makes the first call of one side. Prints its seconds, memory, and the functions that were parsed, as JSON."""
    from mindspore._extends.parse.parser import Parser

    on_cpu()
    step = _sides(case)[side]()
    modules = []
    make_parser_of = Parser.__init__

    def counting(self, function, *args, **kwargs):
        modules.append(getattr(function, "__module__", None) or "")
        make_parser_of(self, function, *args, **kwargs)

    Parser.__init__ = counting
    seconds = seconds_of(step)
    parsed = Counter("own" if module.partition(".")[0] == "ms_lossscale" else "others" for module in modules)
    print(json.dumps({"seconds": seconds, "parsed": [parsed["own"], parsed["others"]], "peak": peak_memory()}))


def _sides(case):
    """Returns the sides of a case, and that of ms_lossscale without a loss scale."""
    from networks import ONE_NETWORK
    from sides import sides_of, unscaled

    sides = sides_of(case)
    if case in ONE_NETWORK:
        sides["loss_scale=None"] = lambda: unscaled(*ONE_NETWORK[case]())
    return sides


def timed(case, side):
    """Returns the cells of a side: the seconds of each phase, summed over all compiled graphs."""
    result, log = measured_by(__file__, "--child", case, side, GLOG_v="1")
    started, seconds = {}, Counter()
    for time, event, phase in _RECORD.findall(log):
        time = datetime.strptime(time.replace(".", ""), "%Y-%m-%d-%H:%M:%S%f")
        if event == "start":
            started[phase] = time
        else:
            seconds[phase] += (time - started[phase]).total_seconds()
    figures = [result["seconds"], *(seconds[phase] for phase in PHASES)]
    figures.append(result["seconds"] - sum(figures[1:]))
    return [*(f"{each:.2f} s" for each in figures), *result["parsed"], f"{result['peak'] >> 20} MiB"]


def counted(case, side):
    """Returns the functions that were parsed, the nodes after each phase, and the operators that are left."""
    with tempfile.TemporaryDirectory() as folder:
        saving = {"MS_DEV_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS_PATH": folder}
        result, _ = measured_by(__file__, "--child", case, side, **saving)
        nodes = {phase: sum(map(int, _NODES.findall(_graphs(folder, f"[0-9]*_{phase}_[0-9]*")))) for phase in COUNTED}
        operators = [name for name in _DEFINITION.findall(_graphs(folder, "graph_build_*")) if name not in _WIRING]
    return {**result, "nodes": nodes, "operators": len(operators)}


def _graphs(folder, pattern):
    """Returns the text of the graphs that MindSpore saved under such names."""
    return "".join(path.read_text(encoding="utf-8") for path in Path(folder).rglob(f"{pattern}.ir"))


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    from sides import CASES

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
    pairs = [(case, side) for case in cases for side in _sides(case)]
    for case, side in tqdm(pairs, unit="process"):
        if arguments.nodes:
            its = counted(case, side)
            rows.append([case, side, *its["parsed"], *its["nodes"].values(), its["operators"]])
        else:
            rows.append([case, side, *timed(case, side)])
    print(markdown_table(header, [list(map(str, row)) for row in rows], left=2), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
