"""MkDocs hooks: pages from beside docs/, and links as they are right in the repository."""

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
BESIDE_DOCS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt",
    "site_hooks/extra.css": "extra.css",
}
HOME = {"en": "README.md", "zh": "README_CN.md"}
# The pages that explain what a training cell can do, and devices, come before those that mention it.
FOUND_FIRST = ("step.md", "performance.md")


class _Pages(Extension, Treeprocessor):
    """Changes the links of a page before MkDocs checks them."""

    def extendMarkdown(self, md):
        md.treeprocessors.register(self, "pages", 7)

    def run(self, root):
        for element in root.iter():
            for attribute in {"href", "src"} & set(element.keys()):
                self._lead(element, attribute)

    def _lead(self, element, attribute):
        """Has a link that is right in the repository lead to the same place in the site."""
        path, hash_sign, anchor = element.attrib.pop(attribute).partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(self.path), unquote(path)))
        if not path or urlsplit(path).scheme or path.startswith("/") or not (ROOT / target).exists():
            element.set(attribute, path + hash_sign + anchor)
        elif target in self.uris:
            relative = posixpath.relpath(self.uris[target], posixpath.dirname(self.uri))
            element.set(attribute, relative + hash_sign + anchor)
        elif target.startswith("docs/") or target in HOME.values():
            # It is in the other language's half of the site, which this build does not know.
            relative = posixpath.relpath(_in_site(target), posixpath.dirname(self.prefix + self.uri))
            element.set(attribute, relative + hash_sign + anchor)
            element.tag = f"elsewhere-{element.tag}"
        else:
            element.tag = "span"


def _in_site(path):
    found = {"README.md": "index.md", "README_CN.md": "zh/index.md"}.get(path, path.removeprefix("docs/"))
    return re.sub(r"\.md$", ".html", found)


_pages = _Pages()


def on_config(config):
    config.markdown_extensions.append(_pages)


def on_files(files, config):
    language = config.theme["language"]
    beside = {HOME[language]: "index.md", **BESIDE_DOCS}
    for path, uri in beside.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    docs = Path(config.docs_dir).relative_to(ROOT).as_posix()
    _pages.prefix = "zh/" if language == "zh" else ""
    _pages.uris = {f"{docs}/{file.src_uri}": file.src_uri for file in files} | beside


def on_page_markdown(markdown, page, config, files):
    _pages.uri = page.file.src_uri
    _pages.path = next(path for path, uri in reversed(_pages.uris.items()) if uri == _pages.uri)
    if page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 2}


def on_page_content(html, page, config, files):
    return re.sub("(</?)elsewhere-", r"\1", html.replace("</elsewhere-img>", ""))
