"""
The jobs of `test_data_parallel.py`, `test_uneven_ranks.py` and `test_sharded_optimizer.py`, and the program that msrun
starts on each rank:

    ranks_program.py FOLDER [SCENARIO/MODE ...]

It runs the scenarios of `data_parallel_training.py`, `rank_checks.py`, `uneven_ranks.py` and `sharded_training.py`,
each in a mode, and writes their records to FOLDER/rank_N.npz.
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

# To find the package `support` when run as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
from mindspore.communication import get_group_size, get_rank, init

from support import data_parallel_training, rank_checks, sharded_training, uneven_ranks
from support.data_parallel_training import MODES, Place, run

SCRIPT = Path(__file__)
SCENARIOS = {**vars(data_parallel_training), **vars(rank_checks), **vars(sharded_training), **vars(uneven_ranks)}


class Job(NamedTuple):
    """A number of ranks, and the scenarios that they run: "name/mode"."""

    ranks: int
    scenarios: tuple


def _in(modes, *names):
    return tuple(map("/".join, itertools.product(names, modes)))


# They cover all that ranks do with each other in a step.
_ESSENTIAL = (
    "one_network",
    "saturating",
    "own_weights",
    "partly_own_weights",
    "large_gradients",
    "different",
    "retried_cycle",
    "semi_auto_parallel",
)
_FURTHER = (
    "summed",
    "cycle",
    "simultaneous",
    "alternating",
    "unchecked",
    "alone",
    "retried",
    "own_scales",
    "own_scales_retried",
)
# Of `test_uneven_ranks.py`: the quick ones, and the others.
_UNEVEN = ("weighted_mean", "high_losses", "bad_cycles")
_UNEVEN_FURTHER = (
    "weighted_sum",
    "weighted_pair",
    "spikes",
    "own_spikes",
    "sharded_spikes",
    "sharded_cycles",
    "bad_steps",
    "bad_steps_retried",
    "bad_cycles_retried",
    "manual",
)
JOBS = (
    # The first is in `make test`, and the last two are for releases. `found` takes long in PyNative mode, and does not
    # depend on the mode.
    Job(2, _in(["graph"], *_ESSENTIAL)),
    Job(2, _in(["pynative"], *_ESSENTIAL, "reduced_by_hooks") + _in(["graph"], "auto_parallel", "found")),
    Job(2, _in(["graph"], *_FURTHER, "reduced_by_hooks")),
    Job(2, _in(["pynative"], *_FURTHER)),
    Job(4, _in(MODES, "one_network", "saturating")),
    # These belong to `test_uneven_ranks.py`. The first is in `make test`.
    Job(2, _in(["graph"], *_UNEVEN)),
    Job(2, _in(["graph"], *_UNEVEN_FURTHER)),
    Job(2, _in(["pynative"], *_UNEVEN, *_UNEVEN_FURTHER)),
    # These belong to `test_sharded_optimizer.py`. The first is in `make test`, and the last three are for releases.
    # Resumed ones load what `sharded_cycle` saved.
    Job(2, _in(["graph"], "sharded_one_network")),
    Job(2, _in(["graph"], "sharded_cycle", "sharded_half")),
    Job(2, _in(["graph"], "sharded_resumed", "sharded_refused", "sharded_merged")),
    Job(2, _in(["pynative"], "sharded_one_network", "sharded_simultaneous", "sharded_alternating")),
    Job(
        2,
        _in(["pynative"], "sharded_cycle", "sharded_half")
        + _in(["graph"], "sharded_simultaneous", "sharded_alternating"),
    ),
    Job(2, _in(["pynative"], "sharded_resumed", "sharded_refused", "sharded_merged")),
    Job(4, _in(MODES, "sharded_one_network", "sharded_merged")),
)


def written(file):
    """Reads what a rank wrote: for each scenario, the list of its records, which are dicts."""
    arrays, scenarios = np.load(file), {}
    for path in arrays.files:
        name, mode, i, key = path.split("/", 3)
        scenarios.setdefault(f"{name}/{mode}", {}).setdefault(int(i), {})[key] = arrays[path]
    return {scenario: [records[i] for i in sorted(records)] for scenario, records in scenarios.items()}


def main(folder, *scenarios):
    init()
    place = Place(get_rank(), get_group_size())
    arrays = {}
    for scenario in scenarios:
        name, mode = scenario.split("/")
        for i, values in enumerate(run(SCENARIOS[name], mode, place)):
            arrays.update((f"{scenario}/{i}/{key}", value) for key, value in values.items())
    np.savez(Path(folder) / f"rank_{place.rank}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
