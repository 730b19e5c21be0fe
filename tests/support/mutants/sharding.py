"""Mutants of sharded optimizers and their checkpoints."""

from support.mutants.mutant import Mutant

_SHARDED = "test_sharded_optimizer.py"
_CHECK = frozenset({"sharing-the-optimizers-state-changes-no-weight"})

MUTANTS = [
    Mutant(
        "each rank updates the first part",
        "sharding/shards.py",
        "tuple(rank * length for length in self._lengths)",
        "tuple(0 * length for length in self._lengths)",
        (_SHARDED,),
        _CHECK,
        ranks=True,
    ),
    Mutant(
        "shards do not take over what else writes the weights",
        "sharding/shards.py",
        "    return ops.assign(shard, part)\n",
        "    return part\n",
        (_SHARDED,),
        survives="only what follows an update writes weights so in the tests, which is in a long one",
    ),
    Mutant(
        "a master is lost when its weight is rounded",
        "sharding/shards.py",
        "part = _select(_equal(rounded, part), shard, part)",
        "part = _select(_equal(rounded, part), part, part)",
        (_SHARDED,),
        survives="float16 weights are in a long test",
    ),
    Mutant(
        "one number of an optimizer's state that is a rank's own is compared, too",
        "step/optimizers.py",
        "p.size == 1 and not p.layerwise_parallel and",
        "p.size == 1 and",
        (_SHARDED,),
    ),
    Mutant(
        "parts are merged in any order",
        "sharding/merge_shards.py",
        "enumerate(zip(parts, got)) if i != rank]",
        "enumerate(zip(parts, got)) if i > 9]",
        (_SHARDED,),
    ),
    Mutant(
        "parts of different steps are merged",
        "sharding/merge_shards.py",
        "same += [name for name in first.values if _COUNTS.search(name)]",
        "",
        (_SHARDED,),
    ),
    Mutant(
        "what needs a whole weight is split if another optimizer holds it",
        "sharding/refusals.py",
        "for _, cell in optimizer.cells_and_names():",
        "for cell in [optimizer]:",
        (_SHARDED,),
    ),
]
