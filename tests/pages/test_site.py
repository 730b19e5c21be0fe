"""What the site's API reference and its table of classes list."""

import re
from collections import Counter

from support.python_process import ROOT

import ms_lossscale


def test_the_api_reference_lists_every_public_name_once():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = Counter(re.findall(r"^::: ms_lossscale\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    assert {name: listed[name] for name in ms_lossscale.__all__} == dict.fromkeys(ms_lossscale.__all__, 1)


# What functions of the table return.
RETURNED = {"ActivationReport", "Float32Advice", "GradientReport", "OverflowTrace"}


def test_the_table_of_classes_has_every_public_name():
    for page in ("which_cell.md", "zh/which_cell.md"):
        table = (ROOT / "docs" / page).read_text().rpartition("\n## ")[2]
        names = set(re.findall(r"`(\w+)`", table))
        assert {name for name in ms_lossscale.__all__ if name not in names} - RETURNED == set(), page
