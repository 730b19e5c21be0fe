"""What the site's API reference lists."""

import re
from collections import Counter

from support.python_process import ROOT

import ms_lossscale


def test_the_api_reference_lists_every_public_name_once():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = Counter(re.findall(r"^::: ms_lossscale\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    assert {name: listed[name] for name in ms_lossscale.__all__} == dict.fromkeys(ms_lossscale.__all__, 1)
