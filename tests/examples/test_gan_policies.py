"""The comparison of policies for the GAN example, run as a user runs it, with small networks and few digits."""

import csv
import json
import re
from statistics import mean

import mindspore
import numpy as np
import pytest
from support.python_process import ROOT, run_python

for package in ("mlxtend", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install ms_lossscale[examples]")

SCRIPT = ROOT / "benchmarks" / "gan_policies.py"
POLICIES = {"simultaneous-skip": "simultaneous, skip", "alternating-retries": "alternating, retries"}
SEEDS = (0, 1)


def write_idx(path, items):
    header = np.array([0x800 + items.ndim, *items.shape], ">u4")
    path.write_bytes(header.tobytes() + items.astype(np.uint8).tobytes())


def write_digits(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        write_idx(folder / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)


def compare(*options, epochs=2, data="data", cwd):
    own = ["--output", "out", "--epochs", epochs, "--rounds", 1, "--jobs", 2, *options]
    # A first scale at which float16 overflows, so that there is something to lose and to try again.
    train = ["--data", data, "--filters", 2, "--batch-size", 8, "--scale", 2**20, "--scale-window", 2]
    return run_python(SCRIPT, *own, "--", *train, cwd=cwd)


def contents(folder):
    """Each file with when it was written and what is in it."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def table_of(text):
    """The rows after the header, by their first cell."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines[2:]}


def figures(folder):
    """What the table says of a run, from what the run itself left."""
    with open(folder / "steps.csv", newline="") as file:
        flags = [(row["discriminator_overflow"], row["generator_overflow"]) for row in csv.DictReader(file)]
    checkpoint = mindspore.load_checkpoint(str(folder / "gan.ckpt"))
    counts = {
        count: sum(
            int(value.asnumpy()) for name, value in checkpoint.items() if name.endswith(f"step_counters.{count}")
        )
        for count in ("retries", "skipped_steps")
    }
    printed = (folder / "stdout.txt").read_text()
    return {
        "lost": sum(flag == "1" for pair in flags for flag in pair),
        "in steps": sum("1" in pair for pair in flags),
        **counts,
        "probability": float(re.search(r"top-class probability: (\S+)", printed).group(1)),
        "classes": int(re.search(r"more than 2 %: (\d+) of", printed).group(1)),
    }


def assert_spread(cell, values, digits):
    """The cell has the mean of the values, and from where to where they go, if they differ."""
    found = [float(number) for number in re.findall(r"[\d.]+", cell)]
    expected = [mean(values), min(values), max(values)] if min(values) < max(values) else [values[0]]
    assert found == pytest.approx(expected, abs=0.5000001 * 10**-digits)


@pytest.mark.nightly
def test_the_table_says_what_the_runs_left_and_nothing_is_run_again(tmp_path):
    write_digits(tmp_path / "data")
    options = ("--policies", *POLICIES, "--seeds", *SEEDS)
    first = compare(*options, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    out = tmp_path / "out"
    assert (out / "gan_policies.md").read_text() == first.stdout
    assert "--policies simultaneous-skip alternating-retries --seeds 0 1 --epochs 2 -- --data data" in first.stdout
    assert "10 steps" in first.stdout

    table = table_of(first.stdout)
    assert list(table) == list(POLICIES.values())
    for policy, name in POLICIES.items():
        runs = [figures(out / policy / str(seed)) for seed in SEEDS]
        by_name = {column: [run[column] for run in runs] for column in runs[0]}
        lost, in_steps, retries, probability, classes, step = table[name]
        assert_spread(lost, by_name["lost"], 0 if lost.isdigit() else 1)
        assert_spread(in_steps, by_name["in steps"], 0 if in_steps.isdigit() else 1)
        if policy == "simultaneous-skip":
            assert retries == "-"
            # Both networks lose each step's update, under one counter.
            assert by_name["lost"] == [2 * skipped for skipped in by_name["skipped_steps"]]
            assert min(by_name["lost"]) > 0
            assert step == "1.00"
        else:
            assert_spread(retries, by_name["retries"], 0 if retries.isdigit() else 1)
            assert by_name["lost"] == by_name["skipped_steps"]
            assert min(by_name["retries"]) > 0
            assert float(step) > 0
        assert_spread(probability, by_name["probability"], 3)
        assert_spread(classes, by_name["classes"], 0 if classes.isdigit() else 1)

    before = contents(out)
    again = compare(*options, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    after = contents(out)
    assert before.keys() == after.keys()
    assert [path.name for path in after if after[path] != before[path]] == ["gan_policies.md"]

    # One was interrupted before it was judged: that one alone goes on.
    record = out / "alternating-retries" / "1" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "result": None}))
    resumed = compare(*options, cwd=tmp_path)
    assert (resumed.returncode, resumed.stdout) == (0, first.stdout)
    assert "Resuming after epoch 2 of 2" in (record.parent / "stdout.txt").read_text()
    changed = {path for path, content in contents(out).items() if content != before[path]}
    assert {path.parent for path in changed} == {record.parent, out}

    other = compare(*options, epochs=3, cwd=tmp_path)
    assert (other.returncode, other.stdout) == (2, "")
    assert "simultaneous-skip/0" in other.stderr.splitlines()[-1]
    assert "--epochs 3" in other.stderr.splitlines()[-1]
