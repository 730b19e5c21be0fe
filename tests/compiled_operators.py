"""Which operators MindSpore runs for a cell in graph mode."""

import os
import re
import tempfile
from collections import Counter
from pathlib import Path

# Nodes that only lead values from one operator, or one branch, to the next.
_WIRING = {"Depend", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}


def operators(cell, *inputs):
    """Compiles the cell for the inputs. Returns a Counter of its operators' names, all branches included."""
    with tempfile.TemporaryDirectory() as folder:
        # Read whenever a graph is compiled. The graphs that are going to run are named graph_build.
        os.environ["MS_DEV_SAVE_GRAPHS"] = "2"
        os.environ["MS_DEV_SAVE_GRAPHS_PATH"] = folder
        try:
            cell.compile(*inputs)
        finally:
            del os.environ["MS_DEV_SAVE_GRAPHS"], os.environ["MS_DEV_SAVE_GRAPHS_PATH"]
        texts = [path.read_text() for path in Path(folder).rglob("graph_build_*.ir")]
    assert texts
    names = Counter(
        name for text in texts for name in re.findall(r"^ *%\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(", text, re.M)
    )
    return Counter({name: count for name, count in names.items() if name not in _WIRING})
