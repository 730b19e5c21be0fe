"""
Runs a cell of cells.py, on the pretended NPU under run.py, or on CPU without it, and prints a line of JSON for each step:
what it returned, and there the kernels, the synchronisations of the host, the copies to the host, and the status register.

    python run.py [--numpy] steps.py CELL [--mode pynative] [--optimizer adam] [--steps 5] [--stale] [--order]
    python steps.py CELL
"""

import argparse
import atexit
import json
import os
import tempfile

ON_NPU = "DRY_ASCEND_SOC" in os.environ
OWN_TRACE = ON_NPU and "DRY_ASCEND_TRACE" not in os.environ
if OWN_TRACE:
    os.environ["DRY_ASCEND_TRACE"] = tempfile.mkstemp(suffix=".trace")[1]
    atexit.register(os.unlink, os.environ["DRY_ASCEND_TRACE"])

import cells
import mindspore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("cell")
parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
parser.add_argument("--optimizer", choices=list(cells.OPTIMIZERS), default="momentum")
parser.add_argument(
    "--steps", type=int, default=5, help="a cell of ours looks at more in its first three (default: %(default)s)"
)
parser.add_argument("--stale", action="store_true", help="other work sets the status register before each other step")
parser.add_argument("--order", action="store_true", help="all launches in their order, too")
args = parser.parse_args()
mindspore.set_seed(1)
mindspore.set_context(mode=mindspore.GRAPH_MODE if args.mode == "graph" else mindspore.PYNATIVE_MODE)
mindspore.set_device("Ascend" if ON_NPU else "CPU")
if ON_NPU:
    import dry_ascend
step, inputs = cells.make(args.cell, args.optimizer)


def events():
    """Returns the lines of the trace since the last mark."""
    lines = open(os.environ["DRY_ASCEND_TRACE"]).read().splitlines()
    return lines[len(lines) - 1 - lines[::-1].index("STEP") :]


for i in range(args.steps):
    if ON_NPU:
        mindspore.runtime.synchronize()
        dry_ascend.register_log.clear()
        if args.stale:
            dry_ascend.set_register(i % 2)
        dry_ascend.mark("STEP")
    output = step(*inputs)
    line = {"step": i}
    if ON_NPU:
        mindspore.runtime.synchronize()
        found = events()
        launches = [each.split()[1] for each in found if each.startswith(("LAUNCH", "ACLOP"))]
        line["kernels"] = len(launches)
        line["synchronisations"] = sum(each.startswith("aclrtSynchronizeStream") for each in found)
        line["to_host"] = [int(each.split()[-1]) for each in found if " D2H " in each]
        line["register"] = list(dry_ascend.register_log)
        if args.order:
            line["order"] = launches
    if not ON_NPU or dry_ascend.computes:
        line["output"] = [each.asnumpy().tolist() for each in (output if isinstance(output, tuple) else (output,))]
    print(json.dumps(line), flush=True)
if OWN_TRACE:
    os.unlink(os.environ["DRY_ASCEND_TRACE"])
os._exit(0)
