"""The LeNet example, run as a user runs it: as scripts, on a small folder of IDX files."""

import argparse
import csv
import gzip
import itertools
import json
import re
import struct

import mindspore
import numpy as np
import pytest
from mindspore import nn
from support.networks import Linear, batch_for
from support.python_process import ROOT, run_python

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

for package in ("mlxtend", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install ms_lossscale[examples]")

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "lenet"
SCRIPTS = ("train.py", "compare.py", "diagnose.py")
# 70 images in batches of 32: two steps an epoch, and six images left out, other ones in each.
TRAIN_IMAGES, STEPS_PER_EPOCH = 70, 2


def write_idx(path, items):
    content = struct.pack(f">{1 + items.ndim}I", 0x800 + items.ndim, *items.shape) + items.tobytes()
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(content)


def make_data(folder):
    """Images that are noise but for a bright row that tells the class; half of the files are gzipped."""
    folder = folder / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", TRAIN_IMAGES), ("t10k", 20)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = rng.integers(0, 100, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), 2 * labels + 4] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)
    return folder


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def _default_onednn():
    """The scripts must choose their own setting of oneDNN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        yield


def run(script, *options, cwd):
    """Runs a script from another folder than its own."""
    return run_python(EXAMPLE / script, *options, cwd=cwd)


def read_rows(folder):
    with open(folder / "steps.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_refused(result, *words):
    """Exit status 2, and one line that says why."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


# A first scale at which float16 overflows, so that there are skipped steps, and a cycle in which it grows.
OPTIONS = ("--scale", 2**24, "--scale-window", 3)
EPOCHS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The output folder of a run that nothing interrupted, what it printed, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    data = make_data(folder)
    result = run("train.py", "--data", data, *OPTIONS, "--epochs", EPOCHS, "--output", "out", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "out", result, data


def test_train_writes_a_row_for_each_step_curves_and_a_checkpoint(whole):
    out, result, _ = whole
    assert "Test accuracy:" in result.stdout
    assert "skipped" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "lenet.ckpt", "steps.csv"]

    rows = read_rows(out)
    assert [int(row["step"]) for row in rows] == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert all(np.isfinite(float(row["loss"])) for row in rows)
    assert (rows[0]["overflow"], float(rows[0]["loss_scale"])) == ("1", 2.0**24)
    for row, following in zip(rows, rows[1:]):
        if row["overflow"] == "1":
            assert float(following["loss_scale"]) == 0.5 * float(row["loss_scale"])

    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    parameters = mindspore.load_checkpoint(str(out / "lenet.ckpt"))
    skipped = sum(row["overflow"] == "1" for row in rows)
    assert int(parameters["step_counters.skipped_steps"].asnumpy()) == skipped
    assert f"skipped {skipped} steps" in result.stdout


@pytest.mark.nightly
def test_a_resumed_run_ends_bit_identical_to_an_uninterrupted_one(whole, tmp_path):
    whole, _, data = whole
    begun = run("train.py", "--data", data, *OPTIONS, "--epochs", 2, "--output", "parts", cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    parts = tmp_path / "parts"
    # A row that the checkpoint knows nothing of: the resumed run writes its own.
    with open(parts / "steps.csv", "a") as file:
        file.write("5,9,0,1\n")

    before = (parts / "steps.csv").read_bytes(), (parts / "lenet.ckpt").read_bytes()
    refused = run("train.py", "--data", data, *OPTIONS, "--seed", 5, "--output", "parts", "--resume", cwd=tmp_path)
    assert_refused(refused, "seed 0", "not 5")
    assert ((parts / "steps.csv").read_bytes(), (parts / "lenet.ckpt").read_bytes()) == before

    resumed = run("train.py", "--data", data, *OPTIONS, "--epochs", 4, "--output", "parts", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert read_rows(parts) == read_rows(whole)
    expected, actual = (mindspore.load_checkpoint(str(folder / "lenet.ckpt")) for folder in (whole, parts))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        if isinstance(value, mindspore.Parameter):
            np.testing.assert_array_equal(value.asnumpy(), actual[name].asnumpy(), err_msg=name)
        else:
            assert value == actual[name]


def truncate(path, count=5):
    path.write_bytes(path.read_bytes()[:-count])


def test_the_last_line_says_steps_or_cycles_and_whether_they_were_checked(parsed, monkeypatch, capsys):
    from common.retries import print_steps

    def last_line(batches, **options):
        args, keywords = parsed(*itertools.chain(*((f"--{name.replace('_', '-')}", v) for name, v in options.items())))
        network = Linear()
        scale = None if args.loss_scale == "none" else DynamicLossScale(2.0**10)
        cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.1), scale, **keywords)
        for overflow in batches:
            cell(*batch_for(overflow))
        print_steps(cell, args, 1, len(batches))
        return capsys.readouterr().out

    assert last_line([True, False], max_retries="0") == "Trained 1 epoch of 2 steps; skipped 1 step that overflowed\n"
    # Each of the two lost cycles has an overflow in both of its calls.
    assert last_line([True] * 4 + [False] * 2, max_retries="0", accumulate="2") == (
        "Trained 1 epoch of 6 batches, in cycles of 2; skipped 2 cycles that overflowed\n"
    )
    assert last_line([True], loss_scale="none") == "Trained 1 epoch of 1 step; nothing was checked for overflow\n"


def test_a_truncated_file_is_one_line_and_status_2(data, tmp_path):
    truncate(data / "train-labels-idx1-ubyte")
    for script in SCRIPTS:
        result = run(script, "--data", data, "--output", "out", cwd=tmp_path)
        assert_refused(result, "train-labels-idx1-ubyte", "truncated")
    assert not (tmp_path / "out").exists()


KINDS = {
    "none": {},
    "fixed": {"scale": 8.0},
    "dynamic": {"scale": 64.0, "scale_window": 5, "max_retries": 3},
    "scheduled": {"milestone": [1], "scales": [2.0]},
}
VALUES = {"scale": ["4"], "scale_window": ["7"], "max_retries": ["2"], "milestone": ["2", "3"], "scales": ["4", "8"]}


@pytest.fixture
def parsed(monkeypatch):
    """Parses the options that both examples have for the loss scale and the step."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from common.options import add_loss_scale_arguments, add_step_arguments, complete_loss_scale, step_keywords

    def parse(*options):
        parser = argparse.ArgumentParser(prog="train.py")
        add_step_arguments(parser, ema=0.0)
        add_loss_scale_arguments(parser, KINDS)
        args = parser.parse_args(options)
        complete_loss_scale(parser, args, KINDS)
        return args, step_keywords(args)

    return parse


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_a_loss_scale_does_not_use_are_refused(parsed, capsys, kind):
    args, keywords = parsed("--loss-scale", kind)
    # A default refuses nothing.
    assert {name: getattr(args, name) for name in KINDS[kind]} == KINDS[kind]
    assert keywords["max_retries"] == KINDS[kind].get("max_retries", 0)
    assert parsed("--loss-scale", kind, "--max-retries", "0")[1]["max_retries"] == 0
    for name, values in VALUES.items():
        option = f"--{name.replace('_', '-')}"
        if name in KINDS[kind]:
            assert np.atleast_1d(getattr(parsed("--loss-scale", kind, option, *values)[0], name)).size == len(values)
            continue
        with pytest.raises(SystemExit) as ended:
            parsed("--loss-scale", kind, option, *values)
        assert ended.value.code == 2
        takers = " or ".join(each for each in KINDS if name in KINDS[each])
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"train.py: error: argument {option}: not used by --loss-scale {kind}: leave out {option} "
            f"{' '.join(values)}, or pass --loss-scale {takers}"
        )


def test_cycles_longer_than_an_epoch_are_refused(data, tmp_path):
    result = run("train.py", "--data", data, "--accumulate", 3, "--output", "out", cwd=tmp_path)
    assert_refused(result, "--accumulate 3 is more than the 2 batches of an epoch", "pass 2 or less")
    assert not (tmp_path / "out").exists()


def test_fewer_epochs_than_there_were_are_refused(whole, tmp_path):
    out, _, data = whole
    options = ("--resume", "--epochs", EPOCHS - 1, "--output", out)
    result = run("train.py", "--data", data, *OPTIONS, *options, cwd=tmp_path)
    assert_refused(result, "has made 4 epochs, more than --epochs 3; pass 4 or more")


@pytest.mark.nightly
def test_diagnose_shows_where_it_underflows_and_writes_the_reports(data, tmp_path):
    # Gradients far below what float16 holds, so that two steps without a scale leave the network as it was.
    options = ("--data", data, "--epochs", 1, "--batch-size", 32, "--profile-batches", 2, "--output", "out")
    result = run("diagnose.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    names = ("activations", "gradients", "gradients_scaled")
    files = {f"{name}.{ending}" for name in names for ending in ("csv", "json", "png")} | {"accuracy.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files

    # The last layer's gradients are all that is left of the backward.
    reports = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in names[1:]}
    zeros = {name: values["zeros"] / values["count"] for name, values in reports["gradients"]["parameters"].items()}
    assert zeros["conv1.weight"] == 1.0
    assert zeros["fc1.weight"] > 0.99
    assert zeros["fc3.bias"] < 0.5
    scaled = reports["gradients_scaled"]
    assert scaled["loss_scale"] > 2.0**20
    assert scaled["parameters"]["conv1.weight"]["zeros"] < scaled["parameters"]["conv1.weight"]["count"]
    assert scaled["recommendation"]["saved"] > 0.5

    table = (tmp_path / "out" / "accuracy.txt").read_text()
    assert [line.split("  ")[1].split(",")[0].split(";")[0] for line in table.splitlines()] == [
        "no loss scale",
        "fixed scale",
        "scheduled scale",
    ]
    assert table in result.stdout
    assert "No cell needs float32" in result.stdout.rpartition("== Does a cell need float32?")[2]


def test_functions_resume_bit_identical(data, tmp_path):
    """The short loop with a ManualStep, in one run and in two."""

    def trained(name, *epochs, options=()):
        lines = []
        for count in epochs:
            result = run("functional.py", "--data", data, "--epochs", count, *options, cwd=tmp_path)
            assert result.returncode == 0, result.stderr
            lines += result.stdout.splitlines()
        return lines, mindspore.load_checkpoint(str(tmp_path / name))

    lines, expected = trained("output/lenet-functional.ckpt", 3)
    # Nothing that git would offer to add.
    assert {path.name for path in tmp_path.iterdir()} <= {"output", "data", "rank_0", "kernel_meta"}
    assert len(lines) == 3
    assert re.fullmatch(r"epoch 3: loss \d\.\d+, \d+\.\d\d% right, scale \d+, skipped \d", lines[-1])
    resumed, actual = trained("parts.ckpt", 1, 3, options=["--checkpoint", "parts.ckpt"])
    assert resumed == lines
    assert expected.keys() == actual.keys()
    assert actual.pop("epoch") == expected.pop("epoch") == 3
    assert (
        int(actual["step_counters.applied_steps"]) + int(actual["step_counters.skipped_steps"]) == 3 * STEPS_PER_EPOCH
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(value.asnumpy(), actual[name].asnumpy(), err_msg=name)
