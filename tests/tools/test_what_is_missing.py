"""The programs of tools/ say what they need and do not find."""

import pytest
from support.python_process import ROOT, run_python

PROGRAMS = [
    f"dry_{device}/{name}.py" for device, name in (("gpu", "count"), ("ascend", "count"), ("ascend", "selfcheck"))
]


@pytest.fixture(params=PROGRAMS)
def said(request, tmp_path):
    """Returns what a program says in an environment."""

    def run(**variables):
        empty = {"PATH": str(tmp_path), "DRY_FOLDER": str(tmp_path / "nothing is built here")}
        result = run_python(ROOT / "tools" / request.param, cwd=tmp_path, **{**empty, **variables})
        assert (result.returncode, result.stdout) == (2, "")
        return result.stderr

    return run


def test_a_compiler(said):
    assert "needs gcc, g++, nm" in said() or "needs MindSpore 2.10" in said()


def test_this_mindspore(said, tmp_path):
    other = tmp_path / "mindspore"
    other.mkdir()
    (other / "__init__.py").touch()
    (other / "version.py").write_text("__version__ = '2.8.0'")
    assert "needs MindSpore 2.10, but " in said(PYTHONPATH=str(tmp_path))
