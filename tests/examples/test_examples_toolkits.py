"""What the scripts of examples/toolkits share; `make toolkits` runs the scripts, which need the toolkits."""

import ast
import importlib.util
import re

import pytest
from support.python_process import ROOT, check_msrun


def test_the_changes_that_the_page_shows_are_those_of_the_scripts():
    page = (ROOT / "docs" / "toolkits.md").read_text()
    scripts = "".join(path.read_text() for path in (ROOT / "examples" / "toolkits").glob("*.py"))
    lines = [line for block in re.findall(r"```diff\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(lines) > 50
    assert [line for line in lines if line[1:] and f"    {line[1:]}\n" not in scripts] == []


def test_the_classes_that_the_page_shows_are_those_of_the_scripts():
    page = (ROOT / "docs" / "toolkits.md").read_text()
    blocks = "".join(block for block in re.findall(r"```py\n(.*?)```", page, re.S) if block.startswith("class "))
    scripts = [ast.parse(path.read_text()) for path in (ROOT / "examples" / "toolkits").glob("*.py")]
    classes = {node.name: node for script in scripts for node in script.body if isinstance(node, ast.ClassDef)}
    shown = ast.parse(blocks).body
    assert len(shown) == 3
    for node in shown:
        # What they are for, the page says in its own words.
        without_docstring = ast.Module(classes[node.name].body[1:], [])
        assert ast.dump(ast.Module(node.body, [])) == ast.dump(without_docstring), node.name


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mindone") is None, reason="`make toolkits` installs mindone elsewhere")
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_zero_of_mindone_on_two_ranks(tmp_path, mode):
    script = ROOT / "examples" / "toolkits" / "mindone_zero.py"
    job = check_msrun(2, script, "--mode", mode, cwd=tmp_path)
    rows = re.findall(r"^\| (m\w+.*?) *\|(.*)\|$", job.logs[0], re.M)
    table = {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}
    assert list(table) == ["ms_lossscale", "ms_lossscale, ZeroHelper", "mindone", "mindone, ZeroHelper"]
    for name in ("ms_lossscale", "ms_lossscale, ZeroHelper"):
        # Clipped to one norm, the same on both ranks, finite after the overflow, and the same after all steps.
        assert table[name] == [0.5, 0.5, 0, 0, 0, 0]
    # What the page says of mindone 0.5.0.
    assert table["mindone"][:5] == [0.5, 0.5, 0, 67, 67]
    rank_0, rank_1, difference, *not_finite = table["mindone, ZeroHelper"][:5]
    assert min(rank_0, rank_1) > 0.5
    assert rank_0 != rank_1
    assert difference > 0.001
    assert not_finite == [67, 67]
