"""The messages that docs/symptoms.md quotes are those of the package."""

import ast
import re

import pytest
from support.python_process import ROOT

PAGE = (ROOT / "docs" / "symptoms.md").read_text()
ROWS = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
QUOTED = sorted({message for row in ROWS for message in re.findall(r'"([^"]+)"', row)})


@pytest.fixture(scope="module")
def messages():
    """All texts of the package, with a line for each and a star for what a message fills in."""
    texts = []
    for path in (ROOT / "ms_lossscale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_there_are_messages():
    assert len(QUOTED) > 20


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_is_one_of_the_package(messages, message):
    assert message in messages
