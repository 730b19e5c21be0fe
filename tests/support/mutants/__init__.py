"""
All mutants: ways to break the package, for `make mutants` and for the tests of the self-check.

The mutants of a source file are in the file of its name here:

    Class.function: what is broken [the tests that should fail, which run first]
      - the code that is replaced, which is once in this function, whatever its indentation and line breaks
      + the new code, unless there is none
      checks: the checks of the self-check that fail, if it is for the self-check
      on: ranks or emulated, if the self-check runs under msrun or on the emulated NPU
      survives: why no core test fails, if none does
"""

from pathlib import Path

from support.mutants.mutant import read

_FOLDER = Path(__file__).parent
MUTANTS = [mutant for path in sorted(_FOLDER.rglob("*.txt")) for mutant in read(path, _FOLDER)]
