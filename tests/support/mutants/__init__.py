"""All mutants: ways to break the package, for `make mutants` and for the tests of the self-check."""

from support.mutants import cells, cycles, diagnosis, forward_state, found_overflow, gradients, scales, sharding, state

_PARTS = (gradients, forward_state, state, found_overflow, cycles, scales, cells, diagnosis, sharding)
MUTANTS = [mutant for part in _PARTS for mutant in part.MUTANTS]
