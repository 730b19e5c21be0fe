"""Finds the differences between a page and its translation."""

import os
import re
from collections import Counter
from decimal import Decimal
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from markdown_it import MarkdownIt

MARKDOWN = MarkdownIt("commonmark").enable("table")
FIGURE = re.compile(r"(\d+(?:[.,]\d+)*)(?:\s*(million|billion|万|亿))?")
CHINESE = re.compile("[\u4e00-\u9fff]")
COMMENT = re.compile(r"(^|\s)# .*$")
# The lines and corners of a diagram.
CONNECTION = re.compile("─+|[│┌┐└┘├┤┬┴┼]")
UNITS = {"million": 10**6, "billion": 10**9, "万": 10**4, "亿": 10**8}
# Chinese may use figures for numbers that English spells out.
NUMERALS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SPELLED = {word: str(value) for value, word in enumerate(NUMERALS, 1)}
SPELLED.update({"twenty": "20", "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "one and a half": "1.5"})
SPELLED_FIGURE = re.compile(rf"\b(?:{'|'.join(sorted(SPELLED, key=len, reverse=True))})\b", re.IGNORECASE)
# Made from the docstrings, which are English.
UNTRANSLATED = "api*.md"


class Block(NamedTuple):
    """A heading, paragraph, list, table cell, code block or the like; `parts` are the tokens of its text."""

    kind: str
    line: int
    source: str
    parts: list

    def figures(self):
        return Counter(_number(*found) for found in FIGURE.findall(self._text()))

    def spelled_figures(self):
        return Counter(SPELLED[word.lower()] for word in SPELLED_FIGURE.findall(self._text()))

    def code(self):
        return Counter(part.content for part in self.parts if part.type == "code_inline")

    def emphasis(self):
        return Counter(part.tag for part in self.parts if part.type in ("em_open", "strong_open"))

    def links(self):
        links = (part.attrs.get("href", part.attrs.get("src")) for part in self.parts)
        return [unquote(link) for link in links if link]

    def _text(self):
        return " ".join(part.content for part in self.parts if part.type == "text")


class Page:
    """A Markdown page as a list of blocks; `anchors` are those that GitHub gives its headings, in order."""

    def __init__(self, path):
        self.path = path
        self.lines = path.read_text(encoding="utf-8").splitlines()
        self.blocks = list(_blocks("\n".join(self.lines) + "\n"))
        self.anchors = _anchors(block for block in self.blocks if re.fullmatch(r"h\d", block.kind))

    def target(self, link):
        """Returns the file or address of a link of this page, and the anchor there."""
        address, _, anchor = link.partition("#")
        if "://" in address:
            return address, anchor
        return Path(os.path.normpath(self.path.parent / address)) if address else self.path, anchor

    def at(self, block):
        return f"{self.path}:{block.line}"


read_page = lru_cache(maxsize=None)(Page)


def counterpart(path):
    """Returns the same page in the other language, or the path itself if the page has none."""
    if path.name in ("README.md", "README_CN.md"):
        return path.with_name("README.md" if path.name == "README_CN.md" else "README_CN.md")
    if path.match("docs/zh/*.md"):
        return path.parents[1] / path.name
    if path.match("docs/*.md") and not path.match(UNTRANSLATED):
        return path.parent / "zh" / path.name
    return path


def pairs(root):
    """Returns the English and Chinese paths of each page that exists in at least one language."""
    english = {path for path in (root / "docs").glob("*.md") if counterpart(path) != path}
    english |= {counterpart(path) for path in (root / "docs" / "zh").glob("*.md")}
    return [(path, counterpart(path)) for path in sorted([root / "README.md", *english])]


def differences(english, chinese):
    """Returns messages on how the page `chinese` is not a translation of the page `english`."""
    found = _language_links(english, chinese)
    for original, translated in zip_longest(english.blocks, chinese.blocks):
        if original is None or translated is None or original.kind != translated.kind:
            return [*found, _other_block(english, original, chinese, translated)]
        where = f"{chinese.at(translated)} ({english.at(original)})"
        if original.kind == "code" and not _same_code(original.source, translated.source):
            found.append(f"{where}: this code differs:\n{translated.source}")
        expected, actual = original.figures(), translated.figures()
        found += _counts(where, "figures", expected, actual - ((actual - expected) & original.spelled_figures()))
        found += _counts(where, "inline code", original.code(), translated.code())
        found += _counts(where, "emphasis", original.emphasis(), translated.emphasis())
        expected = Counter(_translated_place(*english.target(link)) for link in original.links())
        actual = Counter(_place(*chinese.target(link)) for link in translated.links())
        found += _counts(where, "links", expected, actual)
    return found


def broken_links(page):
    """Returns messages on links of a page to files and headings that do not exist."""
    found = []
    for block in page.blocks:
        for link in block.links():
            path, anchor = page.target(link)
            if not isinstance(path, Path):
                continue
            if not path.exists():
                found.append(f"{page.at(block)}: {link} leads to no file")
            elif anchor and anchor not in read_page(path).anchors:
                found.append(f"{page.at(block)}: {link} leads to no heading; there are {read_page(path).anchors}")
    return found


def _blocks(text):
    line, opened, parts = 1, None, []
    for token in MARKDOWN.parse(text):
        if token.map:
            line = token.map[0] + 1
        if token.type == "inline":
            parts += token.children
        elif token.nesting >= 0:
            if opened:
                yield Block(*opened, parts)
            kind = " ".join(map(str, (token.tag or token.type, *token.attrs.values())))
            opened, parts = (kind, line, token.info + "\n" + token.content), []
    if opened:
        yield Block(*opened, parts)


def _anchors(headings):
    anchors, seen = [], Counter()
    for heading in headings:
        text = "".join(part.content for part in heading.parts)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def _same_code(original, translated):
    """Whether a program, or a diagram, is the same; comments and a diagram's words may be in Chinese."""
    lines, translated = original.splitlines(), translated.splitlines()
    return len(lines) == len(translated) and all(
        line == other or (CHINESE.search(other) and _without_words(line) == _without_words(other))
        for line, other in zip(lines, translated)
    )


def _without_words(line):
    connections = CONNECTION.findall(line)
    return [each[0] for each in connections] if connections else COMMENT.sub(r"\1#", line)


def _language_links(english, chinese):
    found = []
    for page, other, language in ((english, chinese, "中文"), (chinese, english, "English")):
        expected = f"[{language}]({Path(os.path.relpath(other.path, page.path.parent)).as_posix()})"
        if page.lines[1:4] != ["", expected, ""]:
            found.append(f"{page.path}:3: the third line must be {expected}, between empty lines")
    return found


def _other_block(english, original, chinese, translated):
    here = f"{chinese.at(translated)} is {translated.kind}" if translated else f"{chinese.path} ends"
    there = f"{english.at(original)} is {original.kind}" if original else f"{english.path} ends"
    return f"{here}, where {there}; what follows was not compared"


def _number(digits, unit):
    """Returns a number in a form that is the same for 25.6 million and 2560万; without a unit, as it is written."""
    return f"{(Decimal(digits.replace(',', '')) * UNITS[unit]).normalize():f}" if unit else digits


def _counts(where, what, expected, actual):
    missing, added = list((expected - actual).elements()), list((actual - expected).elements())
    return [f"{where}: {what}: missing {missing}, added {added}"] if missing or added else []


def _place(target, anchor):
    """Returns a link's target, with the number of the heading instead of its name, which is translated."""
    if anchor and isinstance(target, Path) and target.exists():
        anchors = read_page(target).anchors
        anchor = f"heading {anchors.index(anchor) + 1}" if anchor in anchors else anchor
    return f"{target} {anchor}".strip()


def _translated_place(target, anchor):
    if isinstance(target, Path):
        return _place(target, anchor).replace(str(target), str(counterpart(target)))
    # MindSpore's own site has its Chinese pages without a language folder.
    return _place(re.sub(r"(mindspore\.cn(?:/install)?)/en\b", r"\1", target), anchor)
