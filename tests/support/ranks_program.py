"""The jobs of the tests of ranks, and the program that msrun starts on each rank:

    ranks_program.py FOLDER [SCENARIO/MODE ...]

It runs trainings and scenarios of `data_parallel_training.py`, `rank_checks.py` and `sharded_training.py`, each in a
mode, and writes their records to FOLDER/rank_N. Starting a job and MindSpore takes long, so that few jobs run all."""

import fcntl
import functools
import pickle
import sys
from pathlib import Path
from typing import NamedTuple

# To find the package `support` when run as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import pytest
from mindspore.communication import get_group_size, get_rank, init

from support import rank_checks, sharded_training
from support.data_parallel_training import TRAININGS, Place, in_mode, train
from support.python_process import check_msrun, skip_with_older_mindspore

SCRIPT = Path(__file__)
SCENARIOS = {
    **vars(rank_checks),
    **vars(sharded_training),
    **{name: lambda place, name=name: train(name, place, place.ranks) for name in TRAININGS},
}


class Job(NamedTuple):
    """A number of ranks, the scenarios that they run, "name/mode", and the job that saved what these load."""

    ranks: int
    scenarios: tuple
    loads_from: object = None


def _in(mode, *names):
    return tuple(f"{name}/{mode}" for name in names)


QUICK = ("bounded", "weighted", "own_weights", "different", "sharded_one_network")
CHECKS = ("own_weights", "saturating", "large_gradients", "apart")
SHARDED = ("sharded_one_network", "sharded_cycle", "sharded_alternating", "sharded_half", "sharded_shares")
FOUR = ("bounded", "saturating", "sharded_one_network")
LOADING = ("sharded_resumed", "sharded_merged", "sharded_refused")
# The first is in `make test`, and the last two are for releases.
_QUICK = Job(2, _in("graph", *QUICK))
_GRAPH = Job(2, _in("graph", *(name for name in (*TRAININGS, *CHECKS, "split_weights", *SHARDED) if name not in QUICK)))
_PYNATIVE = Job(2, _in("pynative", *TRAININGS, *CHECKS, *SHARDED) + _in("graph", *LOADING), _GRAPH)
_LOADING = Job(2, _in("pynative", *LOADING), _PYNATIVE)
_FOUR = Job(4, _in("graph", *FOUR, "sharded_merged") + _in("pynative", *FOUR), _GRAPH)
JOBS = (_QUICK, _GRAPH, _PYNATIVE, _LOADING, _FOUR)


def folder_of(factory, worker):
    """Returns the folder that all processes of a test run share, given pytest-xdist's name of this one."""
    base = factory.getbasetemp()
    folder = (base if worker == "master" else base.parent) / "ranks"
    folder.mkdir(exist_ok=True)
    return folder


@functools.lru_cache
def _records(shared, job):  # Runs a job, unless a process of this test run has. Returns what each rank wrote.
    folder = shared / str(JOBS.index(job))
    if job.loads_from is not None:
        _records(shared, job.loads_from)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            check_msrun(job.ranks, SCRIPT, folder, *job.scenarios, cwd=folder, timeout=900)
    files = [folder / f"rank_{rank}" for rank in range(job.ranks)]
    if not all(file.exists() for file in files):
        pytest.fail("its job has failed, as the first test that needed it shows")
    return [pickle.loads(file.read_bytes()) for file in files]


def records_of(shared, name, mode, ranks=2):  # For each rank the records of a scenario.
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("on CPU only: elsewhere each rank needs a device of its own")
    job = next(job for job in JOBS if job.ranks == ranks and f"{name}/{mode}" in job.scenarios)
    if job is not _QUICK:
        skip_with_older_mindspore()
    return [records[f"{name}/{mode}"] for records in _records(shared, job)]


def main(folder, *scenarios):
    init()
    place, records = Place(get_rank(), get_group_size()), {}
    for scenario in scenarios:
        name, mode = scenario.split("/")
        records[scenario] = in_mode(mode, SCENARIOS[name], place)
    (Path(folder) / f"rank_{place.rank}").write_bytes(pickle.dumps(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
