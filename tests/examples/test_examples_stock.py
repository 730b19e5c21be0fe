"""The example of what MindSpore alone loses, run as a user runs it: README's table has its numbers."""

import re

import pytest
from support.python_process import ROOT, check_python

pytestmark = pytest.mark.slow


def test_what_stock_loses(tmp_path):
    printed = check_python(ROOT / "examples" / "what_stock_loses.py", cwd=tmp_path)
    assert re.findall(r"(\S+) times as far", printed) == ["1024", "1"]
    assert re.findall(r"(\d+) skipped, (\d+) of (\d+) predictions", printed) == [("1", "8", "8"), ("1", "0", "8")]
    readme = (ROOT / "README.md").read_text()
    assert "| 1024 | 1 | `python examples/what_stock_loses.py` |" in readme
    assert "| 8 of 8 | 0 of 8 | the same |" in readme
