"""
Prints which kernels a step launches on a GPU that is not there, for sides of a case of a checkout's benchmarks.

    python count.py --case resnet50 --sides stock ms_lossscale [--checkout FOLDER] [--skipped] [--mode pynative] [--json FILE]
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import checkout
import dry_gpu

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--case", required=True, help="of benchmarks/sides.py: resnet50, resnet50_small, transformer, mlp, ..."
)
parser.add_argument("--sides", nargs="*", help="default: all of the case")
parser.add_argument(
    "--checkout", default=".", help="of ms_lossscale, with its benchmarks and examples (default: this folder)"
)
parser.add_argument(
    "--skipped", action="store_true", help="a step that finds an overflow, instead of one that is applied"
)
parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
parser.add_argument("--json", help="write the counts to this file, too")
parser.add_argument("--rounds", type=int, default=5, help="steps of which the host's time is taken")
parser.add_argument("--graphs", help="a folder into which MindSpore saves its graphs")
parser.add_argument("--short", action="store_true", help="no table of the single kernels")
args = parser.parse_args()
launches = dry_gpu.Launches()
base, sides = checkout.use(args.checkout)
import mindspore

base.use("GPU", args.mode)
found = {}


def run(step):
    output = step()
    mindspore.runtime.synchronize()
    return output


def count(side):
    if args.graphs:
        mindspore.set_context(save_graphs=2, save_graphs_path=str(Path(args.graphs) / side.replace(" ", "_")))
    mindspore.set_seed(0)
    launches.overflow(False)
    step = sides.begin(args.case, side)
    start = time.perf_counter()
    run(step)
    first = time.perf_counter() - start
    for _ in range(3):  # What a cell does only in its first calls.
        run(step)
    launches.overflow(args.skipped)
    run(step)
    launches.reset()
    output = run(step)
    names, calls = launches.names(), dry_gpu.counts()
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        run(step)
        times.append(1000 * (time.perf_counter() - start))
    kernels = dict(Counter(names).most_common())
    return {
        "all": len(names),
        "kernels": kernels,
        "skipped": base.was_skipped(output),
        "cuda": calls,
        "first_call": first,
        "ms": sorted(times),
    }


for side in args.sides or sides.CASES[args.case][1]:
    try:
        found[side] = its = count(side)
        print(
            f"{side}: {its['all']} kernels, {sum(its['cuda'].values())} calls of CUDA's libraries, "
            f"{'skipped' if its['skipped'] else 'applied'}, first call {its['first_call']:.1f} s, "
            f"the host's {min(its['ms'], default=0):.1f} ms (least of {args.rounds})",
            flush=True,
        )
    except Exception as error:  # of one side; the others go on
        found[side] = {"error": f"{type(error).__name__}: {str(error)[:1500]}"}
        print(f"{side}: {found[side]['error']}", flush=True)
good = {side: its for side, its in found.items() if "kernels" in its}
every = sorted(
    {k for its in good.values() for k in its["kernels"]},
    key=lambda k: -max(its["kernels"].get(k, 0) for its in good.values()),
)
if every and not args.short:
    print("\n| kernel | " + " | ".join(good) + " |\n|---|" + "---:|" * len(good))
    for k in every:
        row = [its["kernels"].get(k, 0) for its in good.values()]
        print(f"| {k} | " + " | ".join(map(str, row)) + " |" + ("" if len(set(row)) == 1 else " *"))
    print("| all | " + " | ".join(str(its["all"]) for its in good.values()) + " |")
if args.json:
    Path(args.json).write_text(json.dumps(found, indent=1))
sys.exit(len(good) < len(found))
