"""Programs of tests that msrun starts on two ranks, which print what they saw."""

import sys
from pathlib import Path

import mindspore

from support.python_process import check_msrun

TESTS = Path(__file__).resolve().parents[1]

# How a program begins; its arguments are those of `printed_by_ranks`.
BEGINNING = f"""
import sys
sys.path.append({str(TESTS)!r})
from support.rank_programs import join

rank, arguments = join()
"""


def join():
    """Joins the other rank in the mode of the command line. Returns this one's number, and the further arguments."""
    mode, *arguments = sys.argv[1:]
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    mindspore.communication.init()
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return mindspore.communication.get_rank(), arguments


def printed_by_ranks(program, mode, *arguments, folder):
    """For each rank the lines that the program printed, after "end ", of which MindSpore's own are told by that."""
    (folder / "program.py").write_text(BEGINNING + program)
    logs = check_msrun(2, "program.py", mode, *map(str, arguments), cwd=folder).logs
    return [[line[4:] for line in log.splitlines() if line.startswith("end ")] for log in logs]
