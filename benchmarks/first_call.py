"""
Shows where the time of a first call in graph mode goes: MindSpore's phases of compilation, and the number of Python
functions that it parses. It compares ms_lossscale's cell to MindSpore's unscaled one, or what else a case has.

    python benchmarks/first_call.py [CASE ...]

Each side runs in a process of its own. Writing MindSpore's log makes it some tenths slower than in `bench.py`. Prints a
table in GitHub's Markdown.
"""

import argparse
import json
import re
import resource
import sys
from collections import Counter
from datetime import datetime

from before_mindspore import measured_by
from common.output import markdown_table
from tqdm import tqdm

# MindSpore's names of the phases that take long, and what they do.
PHASES = {
    "type_inference": "parse and infer",
    "optimize": "optimize",
    "task_emit": "build kernels",
}

_RECORD = re.compile(r":(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{3}\.\d{3}) .*Status record: (start|end) (\w+) action")


def child(case, side):
    """Makes the first call of one side. Prints its seconds and the functions that were parsed, as JSON."""
    import time

    import mindspore
    from mindspore._extends.parse.parser import Parser

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    step = _sides(case)[side]()
    modules = []
    make_parser_of = Parser.__init__

    def counting(self, function, *args, **kwargs):
        modules.append(getattr(function, "__module__", None) or "")
        make_parser_of(self, function, *args, **kwargs)

    Parser.__init__ = counting
    start = time.perf_counter()
    step().asnumpy()
    seconds = time.perf_counter() - start
    parsed = Counter(module.partition(".")[0] for module in modules)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"seconds": seconds, "parsed": parsed, "peak": peak}))


def _sides(case):
    """Returns the sides of a case, and that of ms_lossscale without a loss scale."""
    from networks import ONE_NETWORK
    from sides import CASES, in_brief, unscaled

    sides = {name: CASES[case][name] for name in in_brief(CASES[case])}
    if case in ONE_NETWORK:
        sides["loss_scale=None"] = lambda: unscaled(*ONE_NETWORK[case]())
    return sides


def measured(case, side):
    """Returns the output of `child`, and the seconds of each phase."""
    result, log = measured_by(__file__, "--child", case, side, GLOG_v="1")
    return {**result, "phases": phases(log)}


def phases(log):
    """Returns the seconds of each phase, summed over all compiled graphs."""
    started, seconds = {}, Counter()
    for time, event, phase in _RECORD.findall(log):
        time = datetime.strptime(time.replace(".", ""), "%Y-%m-%d-%H:%M:%S%f")
        if event == "start":
            started[phase] = time
        else:
            seconds[phase] += (time - started[phase]).total_seconds()
    return seconds


def row(case, side, result):
    figures = [result["seconds"], *(result["phases"][phase] for phase in PHASES)]
    figures.append(result["seconds"] - sum(figures[1:]))
    parsed = result["parsed"]
    own = parsed.pop("ms_lossscale", 0)
    shown = [f"{seconds:.2f} s" for seconds in figures]
    return [case, side, *shown, str(own), str(sum(parsed.values())), f"{result['peak']} MiB"]


def _chosen_cases(parser, cases, default):
    """Returns the cases that are named on the command line."""
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)} (default: {' '.join(default)})"
    )
    chosen = parser.parse_args().cases or default
    if unknown := set(chosen) - set(cases):
        parser.error(f"no such case: {', '.join(sorted(unknown))}. There are {', '.join(cases)}.")
    return chosen


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    from sides import CASES

    parser = argparse.ArgumentParser(description="Show where the time of a first call in graph mode goes.")
    chosen = _chosen_cases(parser, CASES, ["lenet", "resnet18"])
    header = ["case", "side", "first call", *PHASES.values(), "the rest", "functions of ms_lossscale parsed", "others"]
    header.append("peak memory")
    pairs = [(case, side) for case in chosen for side in _sides(case)]
    rows = [row(case, side, measured(case, side)) for case, side in tqdm(pairs, unit="process", dynamic_ncols=True)]
    print(markdown_table(header, rows, left=2), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
