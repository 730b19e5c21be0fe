"""The examples, run as a user runs them: as scripts, from another folder than their own, on few digits."""

import csv
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

import mindspore
import pytest
from conftest import nightly
from support.digits import write_digits
from support.python_process import ROOT, run_python

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
# Of 20 images two batches an epoch, and four images left out, other ones in each.
BATCH, STEPS_PER_EPOCH = ("--batch-size", 8), 2


@pytest.fixture(autouse=True)
def _default_onednn(monkeypatch):
    """The scripts must choose their own setting of oneDNN."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


@pytest.fixture
def data(tmp_path):
    return write_digits(tmp_path / "data")


def run(script, *options, cwd):
    result = run_python(EXAMPLES / script, *options, cwd=cwd, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def assert_refused(result, *words):
    """Exit status 2, nothing printed, and the last line says why."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    for word in words:
        assert word in result.stderr.splitlines()[-1]


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def assert_same_checkpoints(paths):
    expected, actual = (mindspore.load_checkpoint(str(path)) for path in paths)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        if isinstance(value, mindspore.Parameter):
            assert value.asnumpy().tobytes() == actual[name].asnumpy().tobytes(), name
        else:
            assert value == actual[name], name
    return expected


def test_what_stock_loses(tmp_path):
    """README's table has its numbers."""
    printed = run("what_stock_loses.py", cwd=tmp_path).stdout
    assert re.findall(r"(\S+) times as far", printed) == ["1024", "1"]
    assert re.findall(r"(\d+) skipped, (\d+) of (\d+) predictions", printed) == [("1", "8", "8"), ("1", "0", "8")]
    readme = (ROOT / "README.md").read_text()
    assert "| 1024 | 1 |" in readme
    assert "| 8 of 8 | 0 of 8 |" in readme


def test_two_optimizers_for_one_network(tmp_path):
    """Of SGD with a rate of 1/4 and a gradient of -2, and of AdamWeightDecay, whose first step is the same for any."""
    printed = run("two_optimizers.py", cwd=tmp_path).stdout.splitlines()
    assert printed[:2] == ["weight: 0.500", f"bias: {1e-3 * 0.1 / 0.001**0.5:.3f}"]
    assert {"first.accum.weight", "first.global_step", "adam_m.bias", "global_step"} <= set(printed[2].split())


# A first scale at which float16 overflows, so that there are skipped steps. With --n-critic 3 the generator sits out
# the first two steps, and the second epoch begins in the middle of a turn.
LOST = ("--scale", 2**24, "--max-retries", 0)
GAN = ("--filters", 2, "--scale-window", 2, *LOST)
RUNS = {
    "lenet": ("--scale-window", 3, *LOST),
    "gan, both at once": ("--update", "simultaneous", *GAN),
    "gan, in turns": ("--update", "alternating", "--n-critic", 3, *GAN),
    "gan, Wasserstein": ("--filters", 2, "--loss", "wgan-gp", "--n-critic", 3, "--scale", 2**16, "--max-retries", 0),
}
# In which steps the generator learns; that of its third step is known only where that was not skipped.
LEARNS = {"gan, both at once": "1111", "gan, in turns": "0010", "gan, Wasserstein": "0011"}


@pytest.mark.parametrize("name", ["lenet", *nightly(*list(RUNS)[1:])])
def test_a_resumed_run_leaves_what_an_uninterrupted_one_does(name, data, tmp_path):
    example = name.partition(",")[0]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    script, options = f"{example}/train.py", ("--data", data, *BATCH, *RUNS[name], "--output")
    with ThreadPoolExecutor() as pool:
        uninterrupted = pool.submit(run, script, "--epochs", 2, *options, whole, cwd=tmp_path)
        run(script, "--epochs", 1, *options, parts, cwd=tmp_path)
        result = uninterrupted.result()
    assert "skipped" in result.stderr
    files = {path.name: path.read_bytes() for path in parts.iterdir()}
    refused = run_python(EXAMPLES / script, *options, parts, "--resume", "--seed", 5, cwd=tmp_path)
    assert_refused(refused, "can't resume", "seed 0", "not 5")
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == files

    # A row that the checkpoint knows nothing of: the resumed run writes its own.
    with open(parts / "steps.csv", "ab") as file:
        file.write(files["steps.csv"].splitlines()[-1].replace(b"2,", b"3,", 1) + b"\n")
    resumed = run(script, "--epochs", 2, "--resume", *options, parts, cwd=tmp_path)
    assert "Resuming after epoch 1 of 2" in resumed.stdout
    assert result.stdout.splitlines()[-1] == resumed.stdout.splitlines()[-1]
    of_gan = ["epoch-001.png", "epoch-002.png", "judge.ckpt"] if example == "gan" else []
    for folder in (whole, parts):
        assert {path.name for path in folder.iterdir()} == {"curves.png", f"{example}.ckpt", "steps.csv", *of_gan}
    for file in ("steps.csv", *of_gan[:2]):
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file
    parameters = assert_same_checkpoints([folder / f"{example}.ckpt" for folder in (whole, parts)])

    rows = read_rows(whole / "steps.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    skipped = sum(row[column] == "1" for row in rows for column in row if column.endswith("overflow"))
    counted = sum(int(value) for key, value in parameters.items() if key.endswith("step_counters.skipped_steps"))
    assert skipped == counted * (2 if "both" in name else 1) > 0
    if name == "lenet":
        assert f"skipped {skipped} steps" in result.stdout and "Test accuracy:" in result.stdout
    else:
        assert "Mean top-class probability: " in result.stdout
        assert "".join("01"[float(row["generator_loss"]) != 0] for row in rows) == LEARNS[name]


OF_DIGITS = ("--data", "data")
POLICIES = ("--policies", "simultaneous, skip", "alternating, retries")
SHORT = ("--rounds", 1, "--seeds", 0, "--epochs", 1)
OTHERS = {
    "lenet/functional.py": (*OF_DIGITS, "--epochs", 3),
    "lenet/diagnose.py": (*OF_DIGITS, "--epochs", 1, "--batch-size", 32, "--profile-batches", 2),
    "gan/policies.py": (*POLICIES, *SHORT, "--", *OF_DIGITS, "--filters", 2, *BATCH, "--scale", 2**20),
}
PRINTS = {
    "lenet/functional.py": r"epoch 3: loss \d\.\d+, \d+\.\d\d% right, scale \d+, skipped \d\n",
    "lenet/diagnose.py": "No cell needs float32",
    "gan/policies.py": r"\| simultaneous, skip +\| *\d",
}


@pytest.mark.nightly
@pytest.mark.parametrize("script", OTHERS)
def test_other_examples_run(script, tmp_path):
    write_digits(tmp_path / "data", 70)
    assert re.search(PRINTS[script], run(script, *OTHERS[script], cwd=tmp_path).stdout)
    # Nothing that git would offer to add.
    assert {path.name for path in tmp_path.iterdir()} <= {"output", "data", "rank_0", "kernel_meta"}


def test_a_gan_by_hand_loses_what_one_without_retries_loses(data, tmp_path):
    """With MindSpore's functions alone, on the same digits and noise."""
    options = ("--data", data, *BATCH, "--filters", 2, "--scale", 2**20, "--scale-window", 2, "--epochs", 2)
    printed = run("gan/by_hand.py", *options, cwd=tmp_path).stdout
    update = ("--update", "alternating", "--max-retries", 0)
    run("gan/train.py", *options, *update, "--output", "out", cwd=tmp_path)
    rows = read_rows(tmp_path / "out" / "steps.csv")
    lost = sum(int(row[f"{network}_overflow"]) for row in rows for network in ("discriminator", "generator"))
    assert lost > 0 and len(rows) == 2 * STEPS_PER_EPOCH
    assert printed == f"seed 0: {lost} updates lost in {len(rows)} steps\n"


HAS_MINDCV = importlib.util.find_spec("mindcv") is not None
MINDCV = pytest.param("mindcv-resnet18", marks=pytest.mark.skipif(not HAS_MINDCV, reason="`make toolkits` has mindcv"))


@pytest.mark.nightly
@pytest.mark.parametrize("network", ["transformer", "resnet", MINDCV])
def test_float16_learns_as_float32_does_with_the_advice(tmp_path, network):
    printed = run("diagnosis/advise.py", "--networks", network, cwd=tmp_path).stdout
    _, line = (line for line in printed.splitlines() if line.startswith("| "))
    name, *entries = (each.strip() for each in line.strip("|").split("|"))
    entry = re.compile(r"(\d+\.\d) %, (\d+) of (\d+) skipped")
    float32, stuck, advised = (tuple(map(float, entry.fullmatch(each).groups())) for each in entries)
    assert name == network and stuck[1] == stuck[2] and stuck[0] < 20
    assert float32[0] > 30 and advised[0] > float32[0] - 5


@pytest.mark.nightly
def test_each_keyword_of_which_steps_count_does_its_part(tmp_path):
    """Of 60 steps, each tenth is spoilt by NaN, and one is a spike."""
    result = run("which_steps_count/train.py", "--steps", 60, "--output", "out", cwd=tmp_path)
    table = [[entry.strip() for entry in line.strip("|\n").split("|")] for line in result.stdout.splitlines()[2:]]
    skipped, with_spike = "1 condition, 6 loss", "6 loss"
    assert {name: rest for name, _, *rest in table} == {
        "all three": ["65536", "53", skipped],
        "without backoff_if_loss_not_finite=False": ["1024", "53", skipped],
        "without skip_conditions=[NormSpike(...)]": ["65536", "54", with_spike],
        "without weighted=True": ["65536", "53", skipped],
        "none of them": ["1024", "54", with_spike],
    }
    every, _, no_spikes, _, none = (float(loss) for _, loss, *_ in table)
    assert none > every + 0.2 and no_spikes > every + 0.1 and every < 3
    rows = read_rows(tmp_path / "out" / "losses.csv")
    assert [(row["training"], row["step"]) for row in rows] == [(n, str(i)) for n, *_ in table for i in range(0, 61, 2)]
    # All begin with the same weights.
    assert len({row["loss"] for row in rows if row["step"] == "0"}) == 1
    assert (tmp_path / "out" / "curves.png").exists()
