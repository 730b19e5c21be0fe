"""A Griffe extension: docstrings in MindSpore's form, which is Google's with RST inside, as Markdown."""

import re

import griffe
from latex2mathml.converter import convert

# Griffe knows the other sections. What stands in these is prose.
PROSE = re.compile(r"^(Inputs|Outputs|Returns|Yields|Supported Platforms):\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
ROLE = re.compile(r":(class|func|meth):`([\w.]+)`")
FORMULA = re.compile(r":math:`([^`]+)`")
DISPLAYED_FORMULA = re.compile(r"^\.\. math::\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
CODE = re.compile(r"::\n\n((?:(?: {4}.*)?\n)+)")
LINK = re.compile(r"`([^`<]+) <(\S+)>`_")
# RST wants a space after a literal, and the list of parameters shows the default by itself.
SPACE_AFTER_LITERAL = re.compile(r"(``[^`]+``) (?=[.,;:)])")
DEFAULT = re.compile(r"\s+Default: ``[^`]+``\.$", re.MULTILINE)


class MindSporeDocstrings(griffe.Extension):
    """Rewrites the docstrings of a package, once all of it is known."""

    def on_package(self, *, pkg, **_):
        for each in list(_objects(pkg)):
            if each.docstring:
                each.docstring.value = _markdown(each, each.docstring.value)


def _objects(parent):
    for member in parent.members.values():
        if not member.is_alias:
            yield member
            yield from _objects(member)


def _markdown(owner, text):
    text = PROSE.sub(lambda match: f"{_title(match[1])}{_dedented(match[2])}", f"{text}\n")
    text = ROLE.sub(lambda match: _reference(owner, match[1], match[2]), text)
    text = DISPLAYED_FORMULA.sub(lambda match: f"{_scrolled(_formula(match[1], 'block'))}\n\n", text)
    # Without the span, Markdown takes a formula that begins a line for a block of its own.
    text = FORMULA.sub(lambda match: f"<span>{_formula(match[1], 'inline')}</span>", text)
    text = CODE.sub(lambda match: f":\n\n```text\n{_dedented(match[1]).strip()}\n```\n\n", text)
    text = LINK.sub(r"[\1](\2)", text)
    return DEFAULT.sub("", SPACE_AFTER_LITERAL.sub(r"\1", text))


def _title(section):
    return f'<p><span class="doc-section-title">{section}:</span></p>\n\n'


def _dedented(lines):
    return re.sub("^ {4}", "", lines, flags=re.MULTILINE)


def _formula(latex, display):
    # An escaped underscore is a plain one in a docstring of Python, too.
    formula = convert(" ".join(latex.split()), display=display)
    return formula.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def _scrolled(formula):
    # The theme lets such an element scroll by itself where the page is narrow.
    return f'<div class="arithmatex">{formula}</div>'


def _reference(owner, role, name):
    if name.startswith("mindspore."):
        return f"`{name}`"
    try:
        path = _path(owner, role, name.removeprefix("ms_lossscale."))
    except (griffe.NameResolutionError, KeyError):
        # Where such a docstring is shown, the build fails with this name.
        path = name
    return f"[`{name}`][{path}]"


def _path(owner, role, name):
    first, _, rest = name.partition(".")
    if role == "meth" and not rest:
        found, rest = owner if owner.is_class else owner.parent, name
    elif first in owner.package.exports:
        found = owner.package[first]
        if found.is_module and first in found.members:
            # A function and its module of the same name.
            found = found[first]
    else:
        found = owner.package.modules_collection[owner.resolve(first)]
    return (found.all_members[rest] if rest else found).canonical_path
