"""A mutant: a copy of the package with one thing broken."""

import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "ms_lossscale"
_NOT_COPIED = shutil.ignore_patterns("__pycache__")


class Mutant(NamedTuple):
    """
    A mutant replaces one piece of one source file of the package.

    Args:
        name (str): What is broken.
        file (str): The source file, within the package.
        old (str): The text that it replaces, which is once in the file.
        new (str): The new text.
        first (tuple[str]): The test files that should fail, which are run first.
        checks (frozenset[str]): The checks of the self-check that fail; empty if it is not for the self-check.
        emulated (bool): Whether the self-check runs on the emulated NPU.
        ranks (bool): Whether the self-check runs under msrun.
        survives (str): Why no core test fails, if none does.
    """

    name: str
    file: str
    old: str
    new: str
    first: tuple
    checks: frozenset = frozenset()
    emulated: bool = False
    ranks: bool = False
    survives: str = ""

    def source(self):
        """Returns the mutant's source file."""
        text = (ROOT / PACKAGE / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times, and not once: {self.old}")
        return text.replace(self.old, self.new)

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
