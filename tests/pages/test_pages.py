"""What the pages show is true: their programs run and print what the page says, and what they quote is in the package.

A block that is fenced `python` and followed by what it prints runs alone. One fenced `py` is a part of a program."""

import ast
import email
import inspect
import pydoc
import re
import shutil
import subprocess
import sys

import mindspore
import numpy as np
import pytest
from PIL import Image
from support.differences import side_of
from support.in_mode import in_mode
from support.python_process import ROOT, check_python, import_code

import ms_lossscale

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
PROGRAM = re.compile(r"```python\n((?:(?!```).)*)```\n\n((?:    [^\n]*\n)+)", re.S)
PROGRAMS = [pytest.param(*match, id=page) for page, text in PAGES.items() for match in PROGRAM.findall(text)]
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.S | re.M)]
LOSS = re.compile(r"loss (\d\S*),")


@pytest.mark.slow
@pytest.mark.parametrize("program, output", PROGRAMS)
def test_program_prints_what_the_page_says(program, output, tmp_path, capsys):
    # Some pages set another mode.
    with in_mode(mindspore.get_context("mode")):
        import_code(tmp_path, program)
    printed, expected = capsys.readouterr().out, re.sub("^    ", "", output, flags=re.M)
    assert LOSS.sub("", printed).splitlines() == LOSS.sub("", expected).splitlines()
    # In float16, MindSpore's versions round otherwise.
    losses, its_losses = ([float(value) for value in LOSS.findall(text)] for text in (printed, expected))
    np.testing.assert_allclose(losses, its_losses, rtol=3e-3)


def test_each_block_is_python_that_imports_what_there_is():
    assert len(PROGRAMS) > 8
    for block in BLOCKS:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "ms_lossscale":
                assert {each.name for each in node.names} <= set(ms_lossscale.__all__), block


@pytest.mark.slow
def test_the_differences_of_the_readme_run(tmp_path):
    ((program, output),) = PROGRAM.findall(PAGES["quick_start"])
    (shown,) = re.findall(r"\n\n((?:    [^\n]*\n)+)", README)
    assert output.startswith(shown)
    cell, loop = re.findall(r"```diff\n(.*?)```", README, re.S)
    (in_a_loop,) = re.findall(r"```py\n(cell.set_train.*?)```", PAGES["quick_start"], re.S)
    program = program.partition("network = ")[0] + "np.random.seed(0)\n"
    sides = [side_of(cell, "+"), in_a_loop, side_of(loop, "+"), side_of(loop, "-")]
    script = tmp_path / "program.py"
    script.write_text("".join([program, *sides, "print(float(loss), finite)"]))
    *printed, before = check_python(script, cwd=tmp_path).splitlines()
    # The ten epochs of Model, a loop of 16 steps, and one of another step.
    steps = [line.partition(":")[0] for line in printed if "applied" in line]
    assert steps == [f"step {number}" for number in (40, 80, 120, 160, 8, 16)]
    assert printed[-1].endswith("16 applied, 0 skipped") and before.endswith("True")
    # What it replaces is what MindSpore refuses on CPU.
    with pytest.raises(RuntimeError, match="NPUGetFloatStatusV2"):
        import_code(tmp_path, program + side_of(cell, "-"))


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def test_the_differences_of_the_toolkits_are_those_of_their_scripts():
    scripts = "".join(path.read_text() for path in (ROOT / "examples" / "toolkits").glob("*.py"))
    toolkits = PAGES["migration"].partition("\n## MindSpore's toolkits")[2]
    lines = [line for block in re.findall(r"```diff\n(.*?)```", toolkits, re.S) for line in block.splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if line[1:] and f"    {line[1:]}\n" not in scripts] == []


def test_the_messages_of_the_symptoms_are_those_of_the_package():
    """With a line for each, and a star for what a message fills in."""
    texts = []
    for path in (ROOT / "ms_lossscale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    rows = [line.split(" | ")[0] for line in PAGES["diagnosis"].splitlines() if line.startswith("| ")]
    quoted = {message for row in rows for message in re.findall(r'"([^"]+)"', row)}
    assert len(quoted) > 5 and {message for message in quoted if message not in "\n".join(texts)} == set()


def test_the_pages_show_all_pictures_small_legible_on_a_dark_page_and_say_what_is_to_be_seen():
    shown = [match for text in PAGES.values() for match in re.findall(r"!\[(.*?)\]\((?:docs/)?pictures/(.*?)\)", text)]
    pictures = list((DOCS / "pictures").glob("*.png"))
    assert {name for _, name in shown} == {path.name for path in pictures}
    assert all(len(text) > 80 for text, _ in shown)
    for path in pictures:
        picture = Image.open(path)
        assert path.stat().st_size < 120 * 1024 and picture.info.get("transparency") is None
        assert np.array(picture.convert("L"))[0].min() > 200


def test_the_list_of_classes_has_every_public_name():
    for page in ("which_cell.md", "zh/which_cell.md"):
        names = (DOCS / page).read_text().rpartition("\n## ")[2]
        assert set(ms_lossscale.__all__) <= set(re.findall(r"`(\w+)`", names)), page


def test_help_shows_the_api_to_those_who_do_not_build_the_site():
    assert "help(ms_lossscale.ManualStep)" in README and "`help(ManualStep)`" in PAGES["which_cell"]
    for name in ms_lossscale.__all__:
        documented = getattr(ms_lossscale, name)
        first_line = inspect.cleandoc(documented.__doc__).splitlines()[0]
        assert first_line in pydoc.plain(pydoc.render_doc(documented)), name


@pytest.mark.parametrize("address", ["", "https://example.org/ms_lossscale"], ids=["without", "with"])
def test_each_link_of_the_wheels_readme_leads_into_the_repository(tmp_path, address):
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "ms_lossscale", tmp_path / "ms_lossscale", ignore=shutil.ignore_patterns("__pycache__"))
    settings = (ROOT / "setup.cfg").read_text()
    source = f"project_urls =\n    Source = {address}\n" if address else "project_urls =\n"
    (tmp_path / "setup.cfg").write_text(settings.replace("project_urls =\n", source))
    program = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    metadata = email.message_from_string((tmp_path / built.stdout.split()[-1] / "METADATA").read_text())
    assert metadata["Description-Content-Type"] == "text/markdown"
    links, original = (re.findall(r"\]\(([^)]+)\)", text) for text in (metadata.get_payload(), README))
    assert len(links) == len(original) > 15
    for link, its_original in zip(links, original):
        path = its_original.partition("#")[0]
        if path.startswith("https://") or not address:
            assert link == its_original
        else:
            assert link == f"{address}/{'raw' if path.endswith('.png') else 'blob'}/main/{its_original}"
            assert (ROOT / path).is_file()
