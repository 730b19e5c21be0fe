"""Each page in English is there in Chinese: block by block with the same code, figures, emphasis and links."""

import functools
import os
import re
from collections import Counter
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from support.python_process import ROOT

MARKDOWN = MarkdownIt("commonmark").enable("table")
FIGURE = re.compile(r"(\d+(?:[.,]\d+)*)(?:\s*(million|billion|万|亿))?")
UNITS = {"million": 10**6, "billion": 10**9, "万": 10**4, "亿": 10**8}
# Chinese may use figures for numbers that English spells out.
NUMERALS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SPELLED = {word: str(value) for value, word in enumerate(NUMERALS, 1)}
SPELLED.update({"twenty": "20", "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "one and a half": "1.5"})
SPELLED_FIGURE = re.compile(rf"\b(?:{'|'.join(sorted(SPELLED, key=len, reverse=True))})\b", re.IGNORECASE)
# In a line with Chinese words, a comment or, beside the lines and corners of a diagram, its words.
COMMENT, CONNECTION = re.compile(r"(^|\s)# .*$"), re.compile("─+|[│┌┐└┘├┤┬┴┼]")


def counterpart(path):
    """The same page in the other language, or the path itself if there is none."""
    names = {"README.md": "README_CN.md", "README_CN.md": "README.md"}
    if path.name in names:
        return path.with_name(names[path.name])
    if path.parent.name == "zh":
        return path.parents[1] / path.name
    return path.parent / "zh" / path.name if path.parent.name == "docs" and path.suffix == ".md" else path


def blocks_of(text):
    """Yields (kind, line, source, parts) of each heading, paragraph, table cell, code block and the like."""
    opened, parts = ("", 1, ""), []
    for token in MARKDOWN.parse(text):
        if token.type == "inline":
            parts += token.children
        elif token.nesting >= 0:
            yield (*opened, parts)
            line = token.map[0] + 1 if token.map else opened[1]
            kind = " ".join(map(str, (token.tag or token.type, *token.attrs.values())))
            opened, parts = (kind, line, token.info + "\n" + token.content), []
    yield (*opened, parts)


@functools.cache
def anchors_in(path):
    """Those that GitHub gives the headings of a page, in order."""
    headings = [parts for kind, _, _, parts in blocks_of(path.read_text()) if re.fullmatch(r"h\d", kind)]
    texts = ["".join(part.content for part in parts) for parts in headings]
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts]


def place(path, link, translate):
    """Where a link leads, with the number of a heading for its name, which is translated."""
    address, _, anchor = unquote(link).partition("#")
    if "://" in address:
        # MindSpore's own site has its Chinese pages without a language folder.
        address = re.sub(r"(mindspore\.cn(?:/install)?)/en\b", r"\1", address) if translate else address
        return f"{address}#{anchor}"
    target = Path(os.path.normpath(path.parent / address)) if address else path
    if anchor and target.suffix == ".md" and anchor in (anchors := anchors_in(target)):
        anchor = f"heading {anchors.index(anchor) + 1}"
    return f"{counterpart(target) if translate else target}#{anchor}"


def number(digits, unit):
    """25.6 million as 2560万; without a unit, as it is written."""
    return f"{(Decimal(digits.replace(',', '')) * UNITS[unit]).normalize():f}" if unit else digits


def facts_of(path, parts, translate=False):
    """What both languages must have, in whichever order."""
    text = " ".join(part.content for part in parts if part.type == "text")
    links = filter(None, (part.attrs.get("href", part.attrs.get("src")) for part in parts))
    return {
        "figures": Counter(number(*found) for found in FIGURE.findall(text)),
        "spelled": Counter(SPELLED[word.lower()] for word in SPELLED_FIGURE.findall(text)),
        "inline code": Counter(part.content for part in parts if part.type == "code_inline"),
        "emphasis": Counter(part.tag for part in parts if part.type in ("em_open", "strong_open")),
        "links": Counter(place(path, link, translate) for link in links),
    }


def code_lines(source, other):
    """The lines of a block of code, without what may be Chinese where it is."""
    for line, its in zip_longest(source.splitlines(), other.splitlines()):
        connections = CONNECTION.findall(line or "")
        words = re.search("[\u4e00-\u9fff]", f"{line}{its}")
        yield ([each[0] for each in connections] or COMMENT.sub(r"\1#", line or "")) if words else line


def differences(english, chinese):
    """Yields how the page `chinese` is no translation of the page `english`, until the structure differs."""
    texts = [path.read_text(encoding="utf-8") for path in (english, chinese)]
    for path, text, other, language in ((english, texts[0], chinese, "中文"), (chinese, texts[1], english, "English")):
        link = f"[{language}]({Path(os.path.relpath(other, path.parent)).as_posix()})"
        if text.splitlines()[1:4] != ["", link, ""]:
            yield f"{path}:3: the third line must be {link}, between empty lines"
    for original, translated in zip_longest(*map(blocks_of, texts), fillvalue=("the end", 0, "", [])):
        (kind, line, source, parts), (its_kind, its_line, its_source, its_parts) = original, translated
        where = f"{chinese}:{its_line} (of {english}:{line})"
        if kind != its_kind:
            yield f"{where} is {its_kind}, where {kind} was expected; what follows was not compared"
            return
        if kind == "code" and [*code_lines(source, its_source)] != [*code_lines(its_source, source)]:
            yield f"{where}: this code differs:\n{its_source}"
        expected, actual = facts_of(english, parts, translate=True), facts_of(chinese, its_parts)
        added = actual["figures"] - expected["figures"]
        actual["figures"] -= added & expected.pop("spelled")
        for what, its in expected.items():
            if actual[what] != its:
                yield f"{where}: {what}: missing {its - actual[what]}, added {actual[what] - its}"


ENGLISH = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_each_page_is_there_in_both_languages():
    assert {*(ROOT / "docs" / "zh").glob("*.md"), ROOT / "README_CN.md"} == set(map(counterpart, ENGLISH))


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_both_languages_say_the_same(page):
    found = list(differences(page, counterpart(page)))
    assert not found, "\n".join(found)


CODE = "```py\na = 2  # {}\n```\n"
HERE = (
    "# A scale\n\n[中文](zh/scale.md)\n\n## Two of `1,000`\n\n25.6 million, see [it](#two-of-1000).\n\n"
    + CODE.format("b")
)
THERE = "# 系数\n\n[English](../scale.md)\n\n## `1,000`中的2个\n\n2560万, 参见[它](#1000中的2个)。\n\n" + CODE.format(
    "乙"
)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("系数", "系数", None),
        ("[English]", "[英文]", "the third line must be [English](../scale.md)"),
        ("## `", "### `", "is h3, where h2 was expected"),
        ("\n```py\na = 2  # 乙\n```\n", "", "is the end, where code was expected"),
        ("a = 2", "a = 3", "this code differs"),
        ("  # 乙", "", "this code differs"),
        ("2560万", "2560亿", "figures: missing"),
        ("的2个\n", "的3个\n", "figures: missing"),
        ("`1,000`", "`1000`", "inline code: missing"),
        ("系数", "**系数**", "emphasis: missing"),
        ("[它](#1000中的2个)", "[它](#系数)", "links: missing"),
        ("[它](#1000中的2个)", "它", "links: missing"),
    ],
)
def test_a_difference_is_told(tmp_path, old, new, message):
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    pages = tmp_path / "docs" / "scale.md", tmp_path / "docs" / "zh" / "scale.md"
    assert old in THERE
    for page, text in zip(pages, (HERE, THERE.replace(old, new, 1))):
        page.write_text(text, encoding="utf-8")
    found = "\n".join(differences(*pages))
    assert (message in found) if message else (found == "")
