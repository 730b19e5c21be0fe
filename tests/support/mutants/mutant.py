"""A mutant: a copy of the package with one thing broken."""

import ast
import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "ms_lossscale"
_NOT_COPIED = shutil.ignore_patterns("__pycache__")
_HEAD = re.compile(r"(?P<place>[\w.]+): (?P<name>.+) \[(?P<first>[\w, ]+)\]")
_WHOLE_FILE = "module"


class Mutant(NamedTuple):
    """
    A mutant replaces one piece of one function of the package.

    Args:
        name (str): What is broken.
        file (str): The source file, within the package.
        place (str): The function with its class, a class, or ``"module"``.
        old (str): The code that it replaces.
        new (str): The new code.
        first (tuple[str]): The test files that should fail, which are run first.
        checks (frozenset[str]): The checks of the self-check that fail; empty if it is not for the self-check.
        emulated (bool): Whether the self-check runs on the emulated NPU.
        ranks (bool): Whether the self-check runs under msrun.
        survives (str): Why no core test fails, if none does.
    """

    name: str
    file: str
    place: str
    old: str
    new: str
    first: tuple
    checks: frozenset
    emulated: bool
    ranks: bool
    survives: str

    def source(self):
        """Returns the mutant's source file. Raises a ValueError unless the code that it replaces is there once."""
        text = (ROOT / PACKAGE / self.file).read_text(encoding="utf-8")
        code = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        found = [match for begin, end in _spans(text, self.place) for match in code.finditer(text, begin, end)]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {self.file} has {len(found)} times, not once, in {self.place}: {self.old}")
        begin, end = found[0].span()
        line = text[text.rfind("\n", 0, begin) + 1 : begin]
        indentation = line[: len(line) - len(line.lstrip())]
        return text[:begin] + self.new.replace("\n", f"\n{indentation}") + text[end:]

    def copy_package(self, folder):
        """Copies the package into a folder, and breaks the copy."""
        shutil.copytree(ROOT / PACKAGE, Path(folder) / PACKAGE, ignore=_NOT_COPIED)
        (Path(folder) / PACKAGE / self.file).write_text(self.source(), encoding="utf-8")

    def copy_tree(self, folder):
        """Does the same with the tests, and links to everything else that they read."""
        self.copy_package(folder)
        shutil.copytree(ROOT / "tests", Path(folder) / "tests", ignore=_NOT_COPIED)
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and not (Path(folder) / path.name).exists():
                (Path(folder) / path.name).symlink_to(path)


def read(path, folder):
    """Returns the mutants of a file in a folder, whose docstring says how they are written."""
    file = path.relative_to(folder).with_suffix(".py").as_posix()
    return [_mutant(entry, file) for entry in re.split(r"\n+(?! )(?=\S)", path.read_text(encoding="utf-8").strip())]


def _mutant(entry, file):
    first_line, *lines = entry.split("\n")
    head = _HEAD.fullmatch(first_line)
    if head is None:
        raise ValueError(f"{file}: 'place: what is broken [tests]' expected, but got {first_line}")
    told = {key: [] for key in ("-", "+", "checks:", "on:", "survives:")}
    for line in lines:
        key, _, value = line[2:].partition(" ")
        told[key].append(value)
    return Mutant(
        head["name"],
        file,
        head["place"],
        "\n".join(told["-"]),
        "\n".join(told["+"]),
        tuple(f"{test}.py" for test in head["first"].split(", ")),
        frozenset(check for checks in told["checks:"] for check in checks.split(", ")),
        "emulated" in told["on:"],
        "ranks" in told["on:"],
        " ".join(told["survives:"]),
    )


def _spans(text, place):
    """Returns the first and the last character of each function or class of this name; getter and setter have one."""
    if place == _WHOLE_FILE:
        return [(0, len(text))]
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    nodes = [node for name, node in _named(ast.parse(text), "") if name == place]
    return [(starts[_first_line(node) - 1], starts[node.end_lineno]) for node in nodes]


def _named(node, prefix):
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", None)
        is_place = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        if is_place:
            yield f"{prefix}{name}", child
        yield from _named(child, f"{prefix}{name}." if is_place else prefix)


def _first_line(node):
    return min(each.lineno for each in (node, *node.decorator_list))
