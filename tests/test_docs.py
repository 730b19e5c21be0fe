"""The Python code in docs/ runs and prints what the page says."""

import re

import pytest
from support.python_process import ROOT, check_python

BLOCK = re.compile(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", re.S)
PROGRAMS = [
    (page, *match) for page in sorted((ROOT / "docs").glob("*.md")) for match in BLOCK.findall(page.read_text())
]


@pytest.mark.parametrize("page, program, output", PROGRAMS, ids=[page.stem for page, _, _ in PROGRAMS])
def test_program_prints_what_the_page_says(page, program, output, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    printed = [line for line in check_python(script, cwd=tmp_path).splitlines() if not line.startswith("[WARNING]")]
    assert printed == [line.strip() for line in output.splitlines()]


def test_there_are_programs():
    assert PROGRAMS
