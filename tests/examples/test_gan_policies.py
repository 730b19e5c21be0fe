"""The comparison of policies for the GAN example, run as a user runs it, with small networks and few digits."""

import csv
import re
from statistics import mean

import mindspore
import pytest
from support.digits import write_digits
from support.python_process import ROOT, check_python, run_python

SCRIPT = ROOT / "examples" / "gan" / "policies.py"
POLICIES = ("simultaneous, skip", "alternating, retries")
# A first scale at which float16 overflows, so that there is something to lose and to try again.
TRAIN = ("--", "--data", "data", "--filters", 2, "--batch-size", 8, "--scale", 2**20, "--scale-window", 2)


def counted(folder, counter):
    """What a run's checkpoint counted, of all networks."""
    values = mindspore.load_checkpoint(str(folder / "gan.ckpt")).items()
    return sum(int(value) for name, value in values if name.endswith(f"step_counters.{counter}"))


def lost(folder):
    with open(folder / "steps.csv", newline="") as file:
        return [int(row["discriminator_overflow"]) + int(row["generator_overflow"]) for row in csv.DictReader(file)]


def assert_spread(cell, values):
    """The cell has the mean of the values, and from where to where they go, if they differ."""
    expected = [mean(values), min(values), max(values)] if min(values) < max(values) else [values[0]]
    assert [float(number) for number in re.findall(r"[\d.]+", cell)] == pytest.approx(expected, abs=0.050001)


@pytest.mark.nightly
def test_the_table_says_what_the_runs_left_and_nothing_is_run_again(tmp_path):
    write_digits(tmp_path / "data", 40)
    options = ("--output", "out", "--rounds", 1, "--policies", *POLICIES, "--seeds", 0, 1, "--epochs")
    printed = check_python(SCRIPT, *options, 1, *TRAIN, cwd=tmp_path, timeout=1800)
    out = tmp_path / "out"
    assert (out / "gan_policies.md").read_text() == printed
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in printed.splitlines() if row[:1] == "|"]
    assert [row[0] for row in rows[2:]] == list(POLICIES)
    for policy, *cells in rows[2:]:
        runs = [out / policy.replace(", ", "-") / seed for seed in "01"]
        assert_spread(cells[0], [sum(lost(run)) for run in runs])
        assert_spread(cells[1], [sum(map(bool, lost(run))) for run in runs])
        both = 2 if "simultaneous" in policy else 1
        assert [sum(lost(run)) for run in runs] == [both * counted(run, "skipped_steps") for run in runs]
        if "retries" in policy:
            assert_spread(cells[2], [counted(run, "retries") for run in runs])
        else:
            assert cells[2] == "-" and float(cells[0].split()[0]) > 0 and cells[-1] == "1.00"

    # Nothing is trained again, but for one run that was interrupted.
    checkpoints = {path: path.stat().st_mtime_ns for path in out.rglob("gan.ckpt")}
    (out / "simultaneous-skip" / "1" / "result.json").unlink()
    again = run_python(SCRIPT, *options, 1, *TRAIN, cwd=tmp_path, timeout=1800)
    assert [line[:-6] for line in again.stdout.splitlines()] == [line[:-6] for line in printed.splitlines()]
    assert re.findall(r"^\w+, \w+, seed \d$", again.stderr, re.M) == ["simultaneous, skip, seed 1"]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("gan.ckpt")} == checkpoints
    other = run_python(SCRIPT, *options, 2, *TRAIN, cwd=tmp_path)
    assert (other.returncode, other.stdout) == (1, "") and "--epochs 2" in other.stderr
