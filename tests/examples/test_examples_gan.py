"""The GAN example, run as a user runs it: as a script, on a small folder of IDX files and with small networks."""

import csv
import struct
from concurrent.futures import ThreadPoolExecutor

import mindspore
import numpy as np
import pytest
from support.python_process import ROOT, run_python

for package in ("mlxtend", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install ms_lossscale[examples]")

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "gan" / "train.py"
# 20 images in batches of 8: two steps an epoch, and four images left out, other ones in each.
TRAIN_IMAGES, BATCH_SIZE, STEPS_PER_EPOCH = 20, 8, 2
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_idx(path, items):
    path.write_bytes(struct.pack(f">{1 + items.ndim}I", 0x800 + items.ndim, *items.shape) + items.tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part, count in (("train", TRAIN_IMAGES), ("t10k", 10)):
        write_idx(folder / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)).astype(np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))
    return folder


@pytest.fixture(autouse=True, scope="module")
def _default_onednn():
    """The scripts must choose their own setting of oneDNN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        yield


def run(*options, cwd):
    return run_python(SCRIPT, *options, cwd=cwd)


def train(data, *options, cwd):
    result = run("--data", data, "--batch-size", BATCH_SIZE, "--filters", 2, *options, "--output", "out", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result


def read_rows(folder):
    with open(folder / "steps.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_refused(result, *words):
    """Exit status 2, and the last line says why."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr.splitlines()[-1]


def train_whole_and_in_parts(data, tmp_path, *options):
    """A run of two epochs, and one that is resumed after the first: both must leave the same. Returns the table."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    with ThreadPoolExecutor() as pool:
        uninterrupted = pool.submit(train, data, "--epochs", 2, *options, cwd=whole)
        train(data, "--epochs", 1, *options, cwd=parts)
        result = uninterrupted.result()
    assert "Mean top-class probability: " in result.stdout
    assert "Classes with more than 2 %: " in result.stdout
    assert all(f" {digit}: " in result.stdout for digit in range(10))
    assert "skipped" in result.stderr

    assert len(read_rows(parts / "out")) == STEPS_PER_EPOCH
    resumed = train(data, "--epochs", 2, "--resume", *options, cwd=parts)
    assert "Resuming after epoch 1 of 2" in resumed.stdout
    # Both are judged alike, though the second judge was read from its checkpoint.
    assert resumed.stdout.partition("A LeNet")[2] == result.stdout.partition("A LeNet")[2]

    for out in (whole / "out", parts / "out"):
        files = ["curves.png", "epoch-001.png", "epoch-002.png", "gan.ckpt", "judge.ckpt", "steps.csv"]
        assert sorted(path.name for path in out.iterdir()) == files
        for picture in out.glob("*.png"):
            assert picture.read_bytes().startswith(PNG_SIGNATURE)
    for name in ("steps.csv", "epoch-001.png", "epoch-002.png"):
        assert (whole / "out" / name).read_bytes() == (parts / "out" / name).read_bytes(), name
    checkpoints = [mindspore.load_checkpoint(str(folder / "out" / "gan.ckpt")) for folder in (whole, parts)]
    assert checkpoints[0].keys() == checkpoints[1].keys()
    for name in ("generator.project.weight", "discriminator.judge.weight", "optimizer_0.global_step"):
        assert name in checkpoints[0]
    for name, value in checkpoints[0].items():
        if isinstance(value, mindspore.Parameter):
            assert value.asnumpy().tobytes() == checkpoints[1][name].asnumpy().tobytes(), name
        else:
            assert value == checkpoints[1][name], name

    rows = read_rows(whole / "out")
    assert [int(row["step"]) for row in rows] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    return rows


SKIP = ("--max-retries", 0)


# With --n-critic 3 the generator sits out the first two steps, and the second epoch begins in the middle of a turn.
@pytest.mark.parametrize(
    "options",
    [
        ("--update", "simultaneous"),
        pytest.param(("--update", "alternating", "--n-critic", 3), marks=pytest.mark.nightly),
    ],
    ids=lambda o: o[1],
)
def test_a_run_that_is_resumed_leaves_what_an_uninterrupted_one_does(data, tmp_path, options):
    # A first scale at which float16 overflows, so that there are skipped steps to show.
    rows = train_whole_and_in_parts(data, tmp_path, *options, "--scale", 2**24, "--scale-window", 2, *SKIP)
    assert float(rows[0]["discriminator_loss_scale"]) == 2**24
    assert rows[0]["discriminator_overflow"] == "1"
    if "simultaneous" in options:
        assert all(row["generator_overflow"] == row["discriminator_overflow"] for row in rows)
        assert all(float(row["generator_loss"]) > 0 for row in rows)
    else:
        # The fourth step shows no loss of the generator: its turn in the third was skipped.
        assert [row["generator_overflow"] for row in rows] == ["0", "0", "1", "0"]
        assert [float(row["generator_loss"]) > 0 for row in rows] == [False, False, True, False]


@pytest.mark.nightly
def test_a_wasserstein_gan(data, tmp_path):
    # At 65536 the gradient within the critic's loss overflows, and the critic's scale alone backs off.
    rows = train_whole_and_in_parts(data, tmp_path, "--loss", "wgan-gp", "--n-critic", 3, "--scale", 2**16, *SKIP)
    overflows = [row["discriminator_overflow"] == "1" for row in rows]
    assert overflows[0]
    assert not overflows[-1]
    assert not np.isfinite(float(rows[0]["discriminator_loss"]))
    assert np.isfinite(float(rows[-1]["discriminator_loss"]))
    scales = [float(row["discriminator_loss_scale"]) for row in rows]
    assert scales == [2.0 ** (16 - sum(overflows[:step])) for step in range(len(rows))]
    assert [float(row["generator_loss_scale"]) for row in rows[:3]] == [2**16] * 3
    assert [float(row["generator_loss"]) != 0 for row in rows] == [False, False, True, True]

    other = run("--data", data, "--batch-size", BATCH_SIZE, "--resume", "--output", "whole/out", cwd=tmp_path)
    assert_refused(other, "can't resume", "loss wgan-gp, not non-saturating")


def test_bad_options_are_refused(tmp_path):
    cases = {
        ("--n-critic", "2"): "--n-critic",
        ("--n-critic", "0", "--update", "alternating"): "--n-critic",
        ("--loss", "wgan-gp", "--update", "simultaneous", "--n-critic", "2"): "--n-critic: not used by --update simul",
        ("--loss", "wgan-gp", "--separate-scales"): "--separate-scales: not used by --update alternating",
        ("--separate-scales", "--loss-scale", "fixed"): "--separate-scales: not used by --loss-scale fixed, which is",
        ("--loss-scale", "scheduled", "--max-retries", "2"): "--max-retries: not used by --loss-scale scheduled: leave",
        # The default of --max-retries is no option that is refused.
        ("--loss-scale", "fixed", "--data", "nowhere"): "nowhere does not exist",
        ("--loss", "wasserstein"): "invalid choice: 'wasserstein'",
        ("--loss-scale", "none", "--scale", "8"): "--scale",
        ("--resume",): "nothing to resume",
    }
    with ThreadPoolExecutor(2) as pool:
        for result, word in zip(pool.map(lambda options: run(*options, cwd=tmp_path), cases), cases.values()):
            assert_refused(result, word)
    assert not list(tmp_path.iterdir())
