"""Gives the wheel a README whose links lead somewhere outside the repository, too; all else stands in setup.cfg."""

import configparser
import re
from pathlib import Path

import setuptools

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+://)([^)]*)\)")


def repository():
    """The address of the repository, the project URL 'Source' of setup.cfg; empty while there is none."""
    settings = configparser.RawConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    urls = settings.get("metadata", "project_urls", fallback="")
    return dict(re.findall(r"(\w+)\s*=\s*(\S+)", urls)).get("Source", "").rstrip("/")


def readme(url):
    """The README with absolute links and pictures: into the repository at this address, if there is one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return LINK.sub(lambda match: _absolute(url, *match.groups()), text) if url else text


def _absolute(url, picture, text, target):
    # Where the wheel is shown, headings have no anchors.
    path, hash_sign, anchor = target.partition("#")
    return f"{picture}{text}({url}/{'raw' if picture else 'blob'}/main/{path or 'README.md'}{hash_sign}{anchor})"


if __name__ == "__main__":
    setuptools.setup(long_description=readme(repository()), long_description_content_type="text/markdown")
