"""
Makes steps of cells of tools/dry/cells.py, under run.py on the pretended NPU, else on CPU. Prints a line of JSON for
each cell, which has for each step what it returned; and there its launches, how often the host waited for the device,
the sizes of copies to the host, and what happened to the status register.

    python tools/dry_ascend/run.py --numpy tools/dry_ascend/steps.py scaled "alternating with max_retries=3"
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
from dry import cells

ON_NPU = "DRY_ASCEND_SOC" in os.environ
if ON_NPU:
    import dry_ascend


def told(lines):
    """Returns what a step's lines of the trace tell."""
    return {
        "launches": [line.split()[1] for line in lines if line.startswith(("LAUNCH", "ACLOP"))],
        "synchronisations": sum(line.startswith("aclrtSynchronizeStream") for line in lines),
        "to_host": [int(line.split()[-1]) for line in lines if " D2H " in line],
        "register": list(dry_ascend.register_log),
    }


def traced_lines():
    """Returns what was traced since the last call, once the device has done what it was told."""
    mindspore.runtime.synchronize()
    return dry_ascend.traced()


def plain(output):
    """Returns tuples of Tensors as lists of numbers."""
    return [plain(each) if isinstance(each, tuple) else each.asnumpy().tolist() for each in output]


def steps(cell, args):
    mindspore.set_seed(1)
    maker = cells.Maker(args.optimizer, args.scale, args.window)
    step, inputs = cells.make(cell, maker)
    too_large = [each * 1e30 for each in inputs]
    for i in range(args.steps + args.overflows):
        if ON_NPU:
            traced_lines()
            dry_ascend.register_log.clear()
            if args.stale:
                dry_ascend.set_register(i % 2)
        output = step(*(inputs if i < args.steps else too_large))
        found = told(traced_lines()) if ON_NPU else {}
        yield {**found, "output": plain(output if isinstance(output, tuple) else (output,))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("cells", nargs="+", metavar="CELL")
    add("--mode", choices=("graph", "pynative"), default="graph", help="default: %(default)s")
    add("--optimizer", choices=list(cells.OPTIMIZERS), default="momentum", help="default: %(default)s")
    add("--scale", type=float, default=2.0**16, help="the first scale (default: %(default)g)")
    add("--window", type=int, default=100, help="steps after which it grows (default: %(default)s)")
    add("--steps", type=int, default=12, help="a cell looks at more in its first three (default: %(default)s)")
    add("--overflows", type=int, default=0, help="then so many steps that overflow (default: %(default)s)")
    add("--stale", action="store_true", help="other work sets the status register before each other step")
    args = parser.parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE if args.mode == "graph" else mindspore.PYNATIVE_MODE)
    mindspore.set_device("Ascend" if ON_NPU else "CPU")
    for cell in args.cells:
        print(json.dumps({"cell": cell, "steps": list(steps(cell, args))}), flush=True)
    # MindSpore's threads would end with errors of no matter.
    os._exit(0)


if __name__ == "__main__":
    main()
