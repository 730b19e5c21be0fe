"""All mutants: ways to break the package, for `make mutants` and for the tests of the self-check."""

from support.mutants import cells, gradients, scales, state, verdicts, windows

MUTANTS = [mutant for part in (gradients, state, verdicts, windows, scales, cells) for mutant in part.MUTANTS]
