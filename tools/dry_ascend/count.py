"""
Counts for each cell of tools/dry/cells.py what a step launches on an Ascend NPU, and how often the host waits for it,
without one: MindSpore's Ascend backend compiles and launches as ever, stubs stand in for CANN, NumPy computes. Then
asks whether the backend takes the cell on an Ascend 910A, whose default jit_level is O2, the graph engine GE.

    python tools/dry_ascend/count.py                             # `make dry-ascend`, some minutes
    python tools/dry_ascend/count.py scaled manual --saturation --modes graph
    python tools/dry_ascend/count.py unscaled scaled --launches --checkout ../another

Exit status: 0, 1 if a cell failed, 2 if MindSpore 2.10 or a compiler is missing.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import build
import run
from dry import names
from dry.processes import ROOT, one_by_one
from dry.tables import of_cycle, show, table

STEPS = Path(__file__).resolve().parent / "steps.py"
# A cell looks at more in its first three steps. The last applied step ends a cycle of accumulation, as does the last.
APPLIED, OVERFLOWS, CYCLE = 12, 4, 4
# What MindSpore says of a graph that GE does not take, and what its conversion says of the stubs, which comes later.
REFUSED = "GE backend does not support"
AT_THE_STUBS = ("is invalid type  as graph input", "Node output index", "Input handles size")
HEADER = ("cell", "mode", "launches", "host waits", "to host", "with overflow", "host waits", "910A at O2")


def count(cells, mode, args):
    """Returns what a step of each cell does, and says so as it goes."""
    found, begin = {}, time.monotonic()
    command = [STEPS, "--mode", mode, "--steps", APPLIED, "--overflows", OVERFLOWS]
    environment = run.environment(saturation=args.saturation, numpy=True, checkout=args.checkout)
    for cell, its in one_by_one(command, cells, environment):
        found[cell] = its
        what = its.get("error") or f"{len(its['steps'][APPLIED - 1]['launches'])} launches"
        print(f"{cell}, {mode}: {what}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        begin = time.monotonic()
    return found


def asked_ge(cells, mode, args):
    """Returns what becomes of each cell on an Ascend 910A at its default jit_level, and says so as it goes."""
    found = {}
    environment = run.environment(soc="Ascend910A", jit_level="default", checkout=args.checkout)
    for cell, its in one_by_one([STEPS, "--mode", mode, "--steps", 1], cells, environment):
        said = its.get("error", "")
        if REFUSED in said:
            found[cell] = "refused"
        elif any(each in said for each in AT_THE_STUBS):
            found[cell] = "passes the check"
        else:
            found[cell] = said or "runs"
        print(f"{cell}, {mode}, 910A: {found[cell]}", file=sys.stderr, flush=True)
    return found


def row(cell, mode, its):
    at_o2 = its["910A at O2"]
    if "error" in its:
        return [cell, mode, its["error"], *["-"] * (len(HEADER) - 4), at_o2]
    steps = its["steps"]
    applied = numbers(steps[APPLIED - CYCLE], steps[APPLIED - 1])
    return [cell, mode, *applied, *numbers(steps[-CYCLE], steps[-1])[:2], at_o2]


def numbers(first, last):
    """Returns launches, waits and copies to the host of the first and the last call of a cycle, as texts."""
    launches = of_cycle(len(first["launches"]), len(last["launches"]))
    waits = of_cycle(first["synchronisations"], last["synchronisations"])
    return launches, waits, of_cycle(len(first["to_host"]), len(last["to_host"]))


def table_of_launches(mode, found):
    """Returns a table of how often each operator is launched in an applied step of each cell."""
    counts = {cell: Counter(its["steps"][APPLIED - 1]["launches"]) for cell, its in found.items() if "steps" in its}
    operators = sorted({operator for its in counts.values() for operator in its})
    rows = [[operator, *(its[operator] for its in counts.values())] for operator in operators]
    return table([f"operator, {mode}", *counts], rows)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("cells", nargs="*", default=(*names.STOCK, *names.CELLS), metavar="CELL", help="default: all that names.py has")
    add("--modes", nargs="+", choices=("graph", "pynative"), default=("graph", "pynative"), help="default: both")
    add("--saturation", action="store_true", help="count in saturation mode, and not in inf-nan mode")
    add("--checkout", metavar="FOLDER", default=ROOT, help="another checkout of ms_lossscale")
    add("--launches", action="store_true", help="also print how often each operator is launched")
    add("--output", metavar="FILE", help="add the tables to this file, below the command")
    add("--json", metavar="FILE", help="write all that was counted to this file")
    return parser.parse_args()


def main():
    args = options()
    build.folder()
    rows, found = [], {}
    for mode in args.modes:
        found[mode] = count(args.cells, mode, args)
        for cell, answer in asked_ge(args.cells, mode, args).items():
            found[mode][cell]["910A at O2"] = answer
        rows += [row(cell, mode, its) for cell, its in found[mode].items()]
    show(table(HEADER, rows, left=2), args.output)
    if args.launches:
        for mode, its in found.items():
            show(table_of_launches(mode, its), args.output)
    if args.json:
        Path(args.json).write_text(json.dumps(found))
    return int(any("error" in its for cells in found.values() for its in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
