"""The list of mutants is one of the present source: what they replace is there."""

import ast
from pathlib import Path

from support.mutants import MUTANTS


def test_each_breaks_one_place_of_the_present_source():
    for mutant in MUTANTS:
        # ValueError unless the place is there once.
        ast.parse(mutant.source())
        assert mutant.new != mutant.old, mutant.name


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_first_tests_are_there():
    tests = Path(__file__).parent
    assert [name for mutant in MUTANTS for name in mutant.first if not (tests / name).is_file()] == []
