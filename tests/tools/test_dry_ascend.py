"""
What a step does on an Ascend NPU, by MindSpore's Ascend backend without CANN or a chip (tools/dry_ascend), where NumPy
computes: the host waits once for the verdict, the graph engine takes the cells, and the self-check holds.
"""

import json

import pytest
from conftest import slow
from support.dry_devices import counted, run_tool
from support.python_process import ROOT

pytestmark = pytest.mark.only_on("CPU", reason="an NPU that is not there needs no other device")

MODES = ("graph", "pynative")
QUICK = ("scaled", "scaled with BatchNorm", "scaled with accumulation of 4", "simultaneous", "manual")
SLOW = ("simultaneous with accumulation of 4", "compiled manual")
# MindSpore failed to compile it: a constant, the aux of networks that return none, was in its graph.
CLIPS = "simultaneous with clip_norm and ema_decay"


def of_cell(cell, mode):
    """Returns what was counted of a cell; all cells are counted at once."""
    cells = SLOW if cell in SLOW else (*QUICK, CLIPS)
    found = counted("dry_ascend/count.py", *cells, "--modes", *MODES)[mode][cell]
    assert "steps" in found, found
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cell", [*QUICK, *slow(*SLOW)])
def test_the_host_waits_once_in_an_applied_step(cell, mode):
    # A cell looks at more in its first three steps. The fifth begins a cycle of accumulation, whose last call has a
    # branch of its own.
    *first, last = of_cell(cell, mode)["steps"][4:8]
    for step in first:
        assert (step["synchronisations"], step["to_host"]) == (1, [1])
    assert last["synchronisations"] <= (2 if "accumulation" in cell else 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cell", [*QUICK, *slow(*SLOW)])
def test_the_graph_engine_takes_the_cells(cell, mode):
    """It is the default on an Ascend 910A. In PyNative mode what a cell compiles goes round it, and so runs here."""
    goes_round_it = mode == "pynative" and cell != "compiled manual"
    assert of_cell(cell, mode)["910A at O2"] == ("runs" if goes_round_it else "passes the check")


def test_a_cell_of_two_networks_that_clips_compiles():
    assert of_cell(CLIPS, "graph")["steps"][-1]["output"][1] is True


CHECKS = ("an-overflow-in-the-backward", "finite-steps", "an-overflow-before", "a-retry", "reading-the-register")


@pytest.mark.parametrize("overflow_mode", ["saturation", *slow("inf-nan")])
def test_the_self_check_holds(overflow_mode):
    result = run_tool("dry_ascend/selfcheck.py", *CHECKS, "--modes", overflow_mode)
    assert result.returncode == 0, result.stdout[-3000:]
    # In both modes of MindSpore; the register is there in saturation mode only.
    assert f"{10 if overflow_mode == 'saturation' else 8} of " in result.stdout


@pytest.mark.parametrize("mode", MODES)
def test_large_values_that_are_no_overflow_are_not_taken_for_one(mode):
    """In saturation mode the register tells, too, of what this package computes between its clear and its reading."""
    program = ROOT / "tools" / "dry_ascend" / "observer.py"
    result = run_tool("dry_ascend/run.py", "--numpy", "--saturation", program, "--mode", mode)
    steps = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(steps) == 4, result.stderr[-3000:]
    for step in steps:
        assert step["output"][1:] == [False, 1024.0]
        # The forward has seen one of four, and no step is undone.
        assert step["least"][0] < 1e3 and min(step["least"][1:]) > 3e38
