"""MkDocs hooks: pages from beside docs/, links as GitHub reads them, two languages, all public names in the API."""

import copy
import json
import logging
import posixpath
import re
import shutil
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import griffe
import jieba
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.structure.files import File
from mkdocs.structure.nav import Navigation, Section

ROOT = Path(__file__).parent.parent
API_PAGES = "api/*.md"
# Where files of the repository that are not in docs/ stand in the site.
FROM_BESIDE_DOCS = {
    "README.md": "index.md",
    "README_CN.md": "zh/index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt",
    "site_hooks/extra.css": "extra.css",
}
BESIDE_DOCS = {page: path for path, page in FROM_BESIDE_DOCS.items()}
LANGUAGES = {"en": "English", "zh": "中文"}
# The page that explains what a training cell can do comes before those that mention it.
FOUND_FIRST = ("step.md", "zh/step.md")
TITLES_OF_HOME = {"index.md": "Home", "zh/index.md": "首页"}
CHINESE_SECTIONS = {
    "Getting started": "入门",
    "Training": "训练",
    "Devices and speed": "设备与性能",
    "API reference": "API参考 (英文)",
    "About": "关于",
}

# What is only in English, as it is called in the Chinese menu.
CHINESE_TITLES = {
    "api/index.md": "API概览",
    "api/training_cells.md": "训练Cell (API)",
    "api/loss_scales.md": "损失缩放 (API)",
    "api/skip_conditions.md": "跳过条件 (API)",
    "api/overflow.md": "溢出检测 (API)",
    "api/callbacks.md": "回调 (API)",
    "api/diagnosis.md": "诊断 (API)",
    "changelog.md": "更新日志 (英文)",
    "contributing.md": "参与贡献 (英文)",
}

# Opened from the folder, a page can't start the theme's search, which then shows no box.
SEARCH_BOX = '<label class="md-header__button md-icon" for="__search">'
SEARCH_HINTS = {"en": "To search, serve this folder:", "zh": "搜索需要本地服务器"}
SEARCH_HINT = (
    '<small class="search-hint" hidden>{} <code>python -m http.server</code></small>'
    '<script>document.currentScript.previousElementSibling.hidden = location.protocol !== "file:"</script>'
)

# The cells of a table with at most so many letters (a Chinese character counts as two) stay on one line.
SHORT_CELL = 14
SEARCH_INDEX = "search/search_index.json"
# Of what is looked for, the theme's search tries each part as a word, but never the whole.
PARTS_OF_QUERY = re.compile(r"(for\(let (\w+)=(\w+)\+1;\2<)(?=(\w+)\.length;\2\+\+\)\4\.slice\(\3,\2\)in )")

# Of its dictionary, jieba keeps a cache: in the virtual environment, and not in the folder for temporary files.
jieba.dt.tmp_dir = sys.prefix

log = logging.getLogger(f"mkdocs.hooks.{__name__}")


def _path_in_repository(page):
    return BESIDE_DOCS.get(page, f"docs/{page}")


def _link_in_site(link, page):
    """What a link on a page is in the site; None if it leads to a file of the repository that the site doesn't have."""
    path, hash_sign, anchor = link.partition("#")
    if not path or urlsplit(link).scheme or path.startswith("/"):
        return link
    folder = posixpath.dirname(_path_in_repository(page))
    target = posixpath.normpath(posixpath.join(folder, unquote(path)))
    if target in FROM_BESIDE_DOCS:
        target = FROM_BESIDE_DOCS[target]
    elif target.startswith("docs/"):
        target = target[len("docs/") :]
    else:
        return None if (ROOT / target).exists() else link
    return posixpath.relpath(target, posixpath.dirname(page)) + hash_sign + anchor


class _Links(Extension, Treeprocessor):
    """Has links that are right in the repository lead to the same place in the site, before MkDocs checks them."""

    page = None

    def extendMarkdown(self, md):
        md.treeprocessors.register(self, "links_of_repository", 7)

    def run(self, root):
        for element in root.iter():
            for attribute in {"href", "src"} & set(element.keys()):
                link = _link_in_site(element.get(attribute), self.page)
                if link is None:
                    element.tag = "span"
                    del element.attrib[attribute]
                else:
                    element.set(attribute, link)


class _Cells(Extension, Treeprocessor):
    """Marks the short cells of tables, to be kept on one line: Chinese may break after any character."""

    def extendMarkdown(self, md):
        md.treeprocessors.register(self, "short_cells", 6)

    def run(self, root):
        for element in root.iter():
            if element.tag in ("td", "th") and _width("".join(element.itertext())) <= SHORT_CELL:
                element.set("class", "short")


def _width(text):
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text.strip())


_links = _Links()
_menus = {}


def on_config(config):
    config.markdown_extensions += [_links, _Cells()]
    chinese = [f"zh/{page}" for page in _pages_of(config.nav)]
    config.nav += [page for page in chinese if (ROOT / _path_in_repository(page)).exists()]
    _check_public_names("".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob(API_PAGES)))


def _pages_of(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for entries in entry.values():
                yield from _pages_of(entries)


def _check_public_names(markdown):
    listed = Counter(re.findall(r"^::: ms_lossscale\.(?:\w+\.)*(\w+)$", markdown, re.MULTILINE))
    for name in griffe.load("ms_lossscale", search_paths=[ROOT], submodules=False).exports:
        if listed[name] != 1:
            log.warning(f"docs/{API_PAGES} must list the public name '{name}' once, but have it {listed[name]} times.")


def on_files(files, config):
    for path, page in FROM_BESIDE_DOCS.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown, page, config, files):
    _links.page = page.file.src_uri
    if page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 4}


def on_nav(nav, config, files):
    for page in nav.pages:
        if page.file.src_uri in TITLES_OF_HOME:
            page.title = TITLES_OF_HOME[page.file.src_uri]
    chinese = {_other_language(page): page for page in nav.pages if _language(page) == "zh"}
    items = [item for item in nav.items if not (item.is_page and _language(item) == "zh")]
    # What is only in English stands in the Chinese menu as well; it knows its section in the English one, made last.
    for language, translations in (("zh", chinese), ("en", {})):
        menu = [_of_menu(item, translations) for item in items]
        _menus[language] = Navigation(menu, list(_pages_in(menu)))
        of_language = [page for page in _menus[language].pages if _language(page) == language]
        for page, before, after in zip(of_language, [None, *of_language], [*of_language[1:], None]):
            page.previous_page, page.next_page = before, after


def _of_menu(item, translations):
    """A page or section of the English menu as it stands in the menu of these translations."""
    if item.is_page:
        uri = item.file.src_uri
        if not translations or uri in translations or uri not in CHINESE_TITLES:
            return translations.get(uri, item)
        titled = copy.copy(item)
        titled.title = CHINESE_TITLES[uri]
        return titled
    section = Section(CHINESE_SECTIONS[item.title] if translations else item.title, [])
    section.children = [_of_menu(child, translations) for child in item.children]
    for child in section.children:
        child.parent = section
    return section


def _pages_in(items):
    for item in items:
        if item.is_page:
            yield item
        else:
            yield from _pages_in(item.children)


def on_page_context(context, page, config, nav):
    language = _language(page)
    config.theme["language"] = language
    context["nav"] = _menus[language]
    config.extra["alternate"] = [
        {"name": name, "lang": other, "link": (page if other == language else _translation(page, other)).url}
        for other, name in LANGUAGES.items()
    ]


def on_post_page(output, page, config):
    """A Chinese page searches in the index of its language, in zh/. Without a server, a hint is in the box's place."""
    hint = SEARCH_HINT.format(SEARCH_HINTS[_language(page)])
    output = output.replace(SEARCH_BOX, hint + SEARCH_BOX, 1)
    if _language(page) == "zh":
        base = posixpath.relpath("zh", posixpath.dirname(page.url))
        output = re.sub(r'(<script id="__config".*?"base": )"[^"]*"', rf'\1"{base}"', output, count=1)
    return output


def on_post_build(config):
    for worker in Path(config.site_dir).glob("assets/javascripts/workers/search.*.js"):
        worker.write_text(PARTS_OF_QUERY.sub(r"\1=", worker.read_text(encoding="utf-8")), encoding="utf-8")
    _split_search_index(config)
    # The theme looks for one beside each page that is a translation.
    for folder in ("zh", "api"):
        shutil.copy(Path(config.site_dir, "sitemap.xml"), Path(config.site_dir, folder))


def _split_search_index(config):
    """Into Chinese, with what is only in English, and English."""
    path = Path(config.site_dir, SEARCH_INDEX)
    index = json.loads(path.read_text(encoding="utf-8"))
    for language, folder in (("zh", "zh"), ("en", "")):
        urls = {page.url for page in _menus[language].pages}
        docs = [
            {**each, "location": posixpath.relpath(page, folder) + hash_sign + anchor}
            for each in index["docs"]
            for page, hash_sign, anchor in [each["location"].partition("#")]
            if page in urls
        ]
        target = Path(config.site_dir, folder, SEARCH_INDEX)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps({**index, "docs": docs}, ensure_ascii=False), encoding="utf-8")


def _language(page):
    return "zh" if page.file.src_uri.startswith("zh/") else "en"


def _other_language(page):
    uri = page.file.src_uri
    return uri[len("zh/") :] if _language(page) == "zh" else f"zh/{uri}"


def _translation(page, language):
    """The page in the other language, or what the other language begins with."""
    pages = {each.file.src_uri: each for each in _menus[language].pages}
    return pages.get(_other_language(page), _menus[language].pages[0])
