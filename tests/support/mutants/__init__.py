"""All mutants: ways to break the package, for `make mutants` and for the tests of the self-check."""

from support.mutants import cells, forward_state, gradients, scales, state, verdicts, windows

_PARTS = (gradients, forward_state, state, verdicts, windows, scales, cells)
MUTANTS = [mutant for part in _PARTS for mutant in part.MUTANTS]
