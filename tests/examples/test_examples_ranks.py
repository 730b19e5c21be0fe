"""The examples on several ranks: started by msrun as a user starts them, and resumed on another number of ranks."""

import csv
from concurrent.futures import ThreadPoolExecutor

import mindspore
import numpy as np
import pytest
from support.digits import write_digits
from support.python_process import ROOT, run_msrun, run_python, skip_with_older_mindspore

# Of 20 images two steps an epoch, and four images left out, other ones in each.
BATCH_SIZE, STEPS_PER_EPOCH = 8, 2
SMALL = {"lenet": ("--optimizer", "momentum"), "gan": ("--filters", "2")}


@pytest.fixture
def data(tmp_path):
    return write_digits(tmp_path / "data")


def script(example):
    return ROOT / "examples" / example / "train.py"


def printed(log):
    """What a rank printed; MindSpore's own messages begin with their level."""
    return [line for line in log.splitlines() if line and not line.startswith("[")]


def rows_of(folder):
    with open(folder / "steps.csv", newline="") as file:
        return list(csv.DictReader(file))


# In float32 the order of sums rounds little; in float16 it decides what overflows.
def options_of(example, data):
    return ("--data", data, "--batch-size", BATCH_SIZE, "--amp-level", "O0", *SMALL[example], "--output", "out")


def run_on_1_2_1_ranks(example, data, folder):
    """One epoch on one rank, one on two, and one on one. Checks what all examples have in common; returns the table."""
    options = options_of(example, data)
    results = [run_python(script(example), "--epochs", 1, *options, cwd=folder)]
    job = run_msrun(2, script(example), "--epochs", 2, "--resume", *options, cwd=folder)
    results.append(run_python(script(example), "--epochs", 3, "--resume", *options, cwd=folder))
    assert job.returncode == 0, job.logs[0][-3000:]
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]
    assert any("Resuming after epoch 1 of 2" in line for line in printed(job.logs[0]))
    assert printed(job.logs[1]) == []
    rows = rows_of(folder / "out")
    assert [row["step"] for row in rows] == [str(i + 1) for i in range(3 * STEPS_PER_EPOCH)]
    return rows


@pytest.mark.nightly
def test_lenet_goes_on_with_another_number_of_ranks_as_without(data, tmp_path):
    skip_with_older_mindspore()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    with ThreadPoolExecutor() as pool:
        uninterrupted = pool.submit(run_python, script("lenet"), "--epochs", 3, *options_of("lenet", data), cwd=whole)
        rows = run_on_1_2_1_ranks("lenet", data, parts)
    assert uninterrupted.result().returncode == 0, uninterrupted.result().stderr[-3000:]
    for row, wanted in zip(rows, rows_of(whole / "out")):
        np.testing.assert_allclose(float(row["loss"]), float(wanted["loss"]), rtol=1e-4)
        assert (row["overflow"], row["loss_scale"]) == (wanted["overflow"], wanted["loss_scale"])
    parameters, wanted = (mindspore.load_checkpoint(str(folder / "out" / "lenet.ckpt")) for folder in (parts, whole))
    assert parameters.keys() == wanted.keys()
    for name in wanted.keys() - {"settings"}:
        np.testing.assert_allclose(parameters[name].asnumpy(), wanted[name].asnumpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("example", SMALL)
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
    options = ("--data", data, "--batch-size", BATCH_SIZE, "--output", "out")
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
