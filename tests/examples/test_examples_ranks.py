"""The examples on several ranks: started by msrun as a user starts them, and resumed on another number of ranks."""

import csv

import mindspore
import numpy as np
import pytest
from support.digits import write_digits
from support.python_process import ROOT, run_msrun, run_python, skip_with_older_mindspore


@pytest.fixture
def data(tmp_path):
    return write_digits(tmp_path / "data")


def script(example):
    return ROOT / "examples" / example / "train.py"


def rows_of(folder):
    with open(folder / "steps.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("example", ["lenet", "gan"])
def test_ranks_that_can_not_share_a_batch_are_told_so(data, tmp_path, example):
    """What msrun tells its processes is enough: they need not wait for each other to find out."""
    options = ("--data", data, "--batch-size", 7, "--output", "out")
    result = run_python(script(example), *options, cwd=tmp_path, MS_ROLE="MS_WORKER", MS_WORKER_NUM="2", RANK_ID="0")
    assert result.returncode == 2
    assert "--batch-size 7 can't be shared by 2 ranks: choose a multiple of 2" in result.stderr.splitlines()[-1]
    other = run_python(script(example), *options, cwd=tmp_path, MS_ROLE="MS_WORKER", MS_WORKER_NUM="2", RANK_ID="1")
    assert other.returncode == 2
    assert "batch-size" not in other.stderr


@pytest.mark.slow
def test_lenet_on_two_ranks_that_share_the_optimizers_state_is_the_same(data, tmp_path):
    """Its table and its checkpoint, to the last bit, also where it was resumed; and one rank goes on from there."""
    skip_with_older_mindspore()
    options = ("--data", data, "--batch-size", 8, "--output", "out")
    folders = tmp_path / "plain", tmp_path / "shared"
    for folder, runs in zip(folders, ([("--epochs", 2)], [("--epochs", 1), ("--epochs", 2, "--resume")])):
        folder.mkdir()
        for run in runs:
            shared = ["--shard-optimizer"] * (folder.name == "shared")
            job = run_msrun(2, script("lenet"), *run, *shared, *options, cwd=folder)
            assert job.returncode == 0, job.logs[0][-3000:]
    assert rows_of(folders[0] / "out") == rows_of(folders[1] / "out")
    assert {path.name for path in (folders[1] / "out").iterdir()} == {"lenet.ckpt", "steps.csv", "curves.png"}
    wanted, parameters = (mindspore.load_checkpoint(str(folder / "out" / "lenet.ckpt")) for folder in folders)
    assert parameters.keys() == wanted.keys()
    for name in wanted.keys() - {"settings", "epoch"}:
        np.testing.assert_array_equal(parameters[name].asnumpy(), wanted[name].asnumpy(), err_msg=name)
    result = run_python(script("lenet"), "--epochs", 3, "--resume", *options, cwd=folders[1])
    assert result.returncode == 0, result.stderr[-3000:]
