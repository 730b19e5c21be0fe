"""
Counts the operators of a step in graph mode, of all branches: MindSpore's unscaled cell's, and what ms_lossscale adds.

    python benchmarks/operators.py [CASE ...]
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from before_mindspore import chosen_cases
from common.output import markdown_table
from tqdm import tqdm

# Nodes that only lead values from one operator, or one branch, to the next.
_WIRING = {"Depend", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}
_DEFINITION = re.compile(r"^ *%\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(", re.M)


def counted(folder, step):
    """
    Calls `step`. Returns a Counter of the operators that it had MindSpore compile for it, and leaves the graphs in the
    folder. MindSpore decides when it compiles the first graph of a process whether it writes graphs down at all.
    """
    os.environ["MS_DEV_SAVE_GRAPHS"] = "2"
    os.environ["MS_DEV_SAVE_GRAPHS_PATH"] = str(folder)
    step()
    # The graphs that are going to run are named so.
    texts = [path.read_text() for path in Path(folder).rglob("graph_build_*.ir")]
    assert texts
    names = Counter(name for text in texts for name in _DEFINITION.findall(text))
    return Counter({name: count for name, count in names.items() if name not in _WIRING})


def main():
    import mindspore
    from sides import CASES

    cases = [case for case, sides in CASES.items() if {"stock", "ms_lossscale"} <= sides.keys()]
    parser = argparse.ArgumentParser(description="Count the operators that ms_lossscale adds to a compiled step.")
    chosen = chosen_cases(parser, cases, cases)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in tqdm(chosen, unit="case", dynamic_ncols=True):
            stock, scaled = (
                counted(Path(folder, case, side), CASES[case][side]()) for side in ("stock", "ms_lossscale")
            )
            more = {name: scaled[name] - stock[name] for name in sorted({*stock, *scaled})}
            listed = ", ".join(f"{count:+} {name}" for name, count in more.items() if count)
            rows.append((case, sum(stock.values()), sum(more.values()), listed))
    print(markdown_table(("case", "stock", "ms_lossscale adds", "which"), rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
