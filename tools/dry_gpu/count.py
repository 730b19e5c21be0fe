"""
Counts which kernels a training step launches on a GPU, without one: MindSpore's GPU backend compiles and launches as
ever, and stubs stand in for CUDA. Prints a row for each side of a case, with its step applied and with an overflow.

    python tools/dry_gpu/count.py                              # the cases of `make dry-gpu`, some minutes
    python tools/dry_gpu/count.py mlp --sides stock ms_lossscale --kernels
    python tools/dry_gpu/count.py resnet50_small --settings    # each setting of a step
    python tools/dry_gpu/count.py cells --sides scaled "alternating with max_retries=3"
    python tools/dry_gpu/count.py tiny --mode pynative --checkout ../another

Cases and sides are those of benchmarks/sides.py, and the case `cells`, whose sides are in tools/dry/cells.py. Ratios
are to the first side of a case. Exit status: 0, 1 if a side failed, 2 if MindSpore 2.10 or a compiler is missing.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import build
from dry import names
from dry.processes import ROOT, environment, one_by_one
from dry.tables import of_cycle, show, table

HERE = Path(__file__).resolve().parent
CASES = ("resnet50", "transformer", "dcgan128", "mlp", "tiny")
SIDES = ("stock", "ms_lossscale", "stock with loss scale")
SETTINGS = ("stock", "plain", "loss_scale=None", *names.SETTINGS, "ManualStep")
# Columns of the table: kernels whose numbers tell whether MindSpore fused what it fuses in an unscaled step.
FUSED = ("BatchNormGradWithActivation", "BatchNormGradWithAddAndActivation")
SINGLE = ("BatchNormGrad", "ReluGrad", "Transpose", "TensorMove", "Mul")
HEADER = ("case", "side", "kernels", "ratio", "with overflow", "to device", "to host", "fused BatchNormGrad", *SINGLE)


def row(case, side, found, unscaled):
    """Returns the row of a side, `unscaled` being the number of kernels that it is compared to."""
    if "error" in found:
        return [case, side, found["error"], *["-"] * (len(HEADER) - 3)]
    applied = found["applied"]
    counts = Counter(applied["kernels"])
    number = len(applied["kernels"])
    first = len(found["applied, first of a cycle"]["kernels"])
    numbers = of_cycle(first, number)
    if applied["compiled"] < number:
        numbers += f", {applied['compiled']} compiled"
    return [
        case,
        side,
        f"{numbers}, skipped" if applied["skipped"] else numbers,
        f"{number / unscaled:.2f}" if unscaled else "-",
        len(found["overflow"]["kernels"]),
        applied["copies"]["memcpyHtoD"],
        applied["copies"]["memcpyDtoH"],
        sum(counts[name] for name in FUSED),
        *(counts[name] for name in SINGLE),
    ]


def table_of_kernels(case, found):
    """Returns a table of how often each kernel is launched in an applied step of each side."""
    counts = {side: Counter(its["applied"]["kernels"]) for side, its in found.items() if "error" not in its}
    kernels = {kernel for its in counts.values() for kernel in its}
    rows = [[kernel, *(its[kernel] for its in counts.values())] for kernel in kernels]
    rows.sort(key=lambda row: (-max(row[1:]), row[0]))
    return table([f"kernel, {case}", *counts], rows)


def count(case, sides, mode, checkout):
    """Returns what each side launches, and says so as it goes."""
    found = {}
    script, begin = HERE / "counted_steps.py", time.monotonic()
    for side, its in one_by_one([script, mode, case], sides, environment(checkout)):
        found[side] = its
        what = its.get("error") or f"{len(its['applied']['kernels'])} kernels"
        print(f"{case}, {side}: {what}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        begin = time.monotonic()
    return found


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("cases", nargs="*", default=CASES, metavar="CASE", help=f"default: {' '.join(CASES)}")
    add("--sides", nargs="+", default=SIDES, metavar="SIDE", help=f"default: {', '.join(SIDES)}")
    add("--settings", dest="sides", action="store_const", const=SETTINGS, help=f"as sides: {', '.join(SETTINGS)}")
    add("--mode", choices=("graph", "pynative"), default="graph", help="default: %(default)s")
    add("--checkout", metavar="FOLDER", default=ROOT, help="another checkout of ms_lossscale, with its benchmarks")
    add("--kernels", action="store_true", help="also print how often each kernel is launched")
    add("--output", metavar="FILE", help="add the tables to this file, below the command")
    add("--json", metavar="FILE", help="write all that was counted to this file")
    return parser.parse_args()


def main():
    args = options()
    build.folder()
    found, rows = {}, []
    for case in args.cases:
        found[case] = its = count(case, args.sides, args.mode, args.checkout)
        first = next(iter(its.values()))
        unscaled = None if "error" in first else len(first["applied"]["kernels"])
        rows += [row(case, side, counted, unscaled) for side, counted in its.items()]
    show(table(HEADER, rows, left=2), args.output)
    if args.kernels:
        for case, its in found.items():
            show(table_of_kernels(case, its), args.output)
    if args.json:
        Path(args.json).write_text(json.dumps(found))
    return int(any("error" in counted for its in found.values() for counted in its.values()))


if __name__ == "__main__":
    sys.exit(main())
