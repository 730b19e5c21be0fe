"""Each page in English is there in Chinese: section by section with the same code, figures and links."""

import functools
import os
import re
from collections import Counter
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from support.python_process import ROOT

MARKDOWN = MarkdownIt("commonmark").enable("table")
FIGURE = re.compile(r"(\d+(?:[.,]\d+)*)(?:\s*(million|billion|万|亿))?")
UNITS = {"million": 10**6, "billion": 10**9, "万": 10**4, "亿": 10**8}
# In a line with Chinese words, a comment or, beside the lines and corners of a diagram, its words.
COMMENT, CONNECTION = re.compile(r"(^|\s)# .*$"), re.compile("─+|[│┌┐└┘├┤┬┴┼]")


class Section(NamedTuple):  # A heading's level, line and text, and what is below it: blocks of code, and parts of text.
    level: str
    line: int
    heading: str
    code: list
    parts: list


def counterpart(path):  # The same page in the other language, or the path itself if there is none.
    names = {"README.md": "README_CN.md", "README_CN.md": "README.md"}
    if path.name in names:
        other = path.with_name(names[path.name])
        return other if other.exists() else path
    if path.parent.name == "zh":
        return path.parents[1] / path.name
    return path.parent / "zh" / path.name if (path.parent / "zh").is_dir() and path.suffix == ".md" else path


@functools.cache
def sections_of(path):
    found, tokens = [], MARKDOWN.parse(path.read_text(encoding="utf-8"))
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            text = "".join(part.content for part in tokens[i + 1].children)
            found.append(Section(token.tag, token.map[0] + 1, text, [], []))
        elif token.type == "inline":
            found[-1].parts.extend(token.children)
        elif token.type in ("fence", "code_block"):
            found[-1].code.append(f"{token.info}\n{token.content}")
    return found


def place(path, link, translate):  # Where a link leads, with the number of a heading for its name, which is translated.
    address, _, anchor = unquote(link).partition("#")
    if "://" in address:
        # MindSpore's own site has its Chinese pages without a language folder.
        address = re.sub(r"(mindspore\.cn(?:/install)?)/en\b", r"\1", address) if translate else address
        return f"{address}#{anchor}"
    target = Path(os.path.normpath(path.parent / address)) if address else path
    if anchor and target.suffix == ".md":
        # As GitHub makes them.
        headings = [section.heading.lower() for section in sections_of(target)]
        anchors = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]
        anchor = f"heading {anchors.index(anchor) + 1}" if anchor in anchors else anchor
    return f"{counterpart(target) if translate else target}#{anchor}"


def number(digits, unit):  # 25.6 million as 2560万; without a unit, as it is written.
    return f"{(Decimal(digits.replace(',', '')) * UNITS[unit]).normalize():f}" if unit else digits


def facts_of(path, parts, translate=False):  # What both languages must have, in whichever order.
    text = " ".join(part.content for part in parts if part.type == "text")
    links = filter(None, (part.attrs.get("href", part.attrs.get("src")) for part in parts))
    return {
        "figures": Counter(number(*found) for found in FIGURE.findall(text)),
        "inline code": Counter(part.content for part in parts if part.type == "code_inline"),
        "links": Counter(place(path, link, translate) for link in links),
    }


def code_lines(source, other):  # The lines of a block of code, without what may be Chinese where it is.
    for line, its in zip_longest(source.splitlines(), other.splitlines()):
        connections = CONNECTION.findall(line or "")
        words = re.search("[\u4e00-\u9fff]", f"{line}{its}")
        yield ([each[0] for each in connections] or COMMENT.sub(r"\1#", line or "")) if words else line


def differences(english, chinese):  # Yields how the page `chinese` is no translation of the page `english`.
    for path, other, language in ((english, chinese, "中文"), (chinese, english, "English")):
        link = f"[{language}]({Path(os.path.relpath(other, path.parent)).as_posix()})"
        if path.read_text(encoding="utf-8").splitlines()[1:4] != ["", link, ""]:
            yield f"{path}:3: the third line must be {link}, between empty lines"
    both = sections_of(english), sections_of(chinese)
    levels, its_levels = ([section.level for section in sections] for sections in both)
    if levels != its_levels:
        yield f"{chinese}: the headings are {its_levels}, where {levels} were expected"
        return
    for section, its_section in zip(*both):
        where = f"{chinese}:{its_section.line} (of {english}:{section.line})"
        for source, its_source in zip_longest(section.code, its_section.code, fillvalue=""):
            if [*code_lines(source, its_source)] != [*code_lines(its_source, source)]:
                yield f"{where}: this code differs:\n{its_source}"
        expected, actual = facts_of(english, section.parts, True), facts_of(chinese, its_section.parts)
        # Chinese may use figures for small numbers that English spells out.
        added = actual["figures"] - expected["figures"]
        actual["figures"] -= Counter({figure: count for figure, count in added.items() if len(figure) < 4})
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
HERE = "# A scale\n\n[中文](zh/scale.md)\n\n## Two of `1,000`\n\n25.6 million, see [it](#two-of-1000).\n\n"
THERE = "# 系数\n\n[English](../scale.md)\n\n## `1,000`中的2个\n\n2560万, 参见[它](#1000中的2个)。\n\n"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("系数", "系数", None),
        ("[English]", "[英文]", "the third line must be [English](../scale.md)"),
        ("## `", "### `", "the headings are ['h1', 'h3']"),
        ("```py\na = 2  # 乙\n```\n", "", "this code differs"),
        ("a = 2", "a = 3", "this code differs"),
        ("  # 乙", "", "this code differs"),
        ("2560万", "2560亿", "figures: missing"),
        ("`1,000`", "`1000`", "inline code: missing"),
        ("[它](#1000中的2个)", "[它](#系数)", "links: missing"),
    ],
)
def test_a_difference_is_told(tmp_path, old, new, message):
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    pages = tmp_path / "docs" / "scale.md", tmp_path / "docs" / "zh" / "scale.md"
    there = THERE + CODE.format("乙")
    assert old in there
    for page, text in zip(pages, (HERE + CODE.format("b"), there.replace(old, new, 1))):
        page.write_text(text, encoding="utf-8")
    found = "\n".join(differences(*pages))
    assert (message in found) if message else (found == "")
