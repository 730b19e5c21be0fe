"""The Python code in docs/ runs and prints what the page says, and the README's runs."""

import re

import mindspore
import pytest
from support.in_mode import in_mode
from support.python_process import ROOT, check_python, import_code

BLOCK = re.compile(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", re.S)
PROGRAMS = [
    (page, *match) for page in sorted((ROOT / "docs").glob("*.md")) for match in BLOCK.findall(page.read_text())
]


@pytest.mark.parametrize("page, program, output", PROGRAMS, ids=[page.stem for page, _, _ in PROGRAMS])
def test_program_prints_what_the_page_says(page, program, output, tmp_path, capsys):
    # Some pages set another mode.
    with in_mode(mindspore.get_context("mode")):
        import_code(tmp_path, program)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line.strip() for line in output.splitlines()]


def test_there_are_programs():
    assert PROGRAMS


def test_the_code_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 2
    script = tmp_path / "program.py"
    # Each goes on where the one before it has ended.
    script.write_text("\n".join(blocks))
    printed = check_python(script, cwd=tmp_path)
    assert len(re.findall(r"loss is \d", printed)) == 5 * 8
    assert {"gradients.png", "scale.csv"} <= {path.name for path in tmp_path.iterdir()}
