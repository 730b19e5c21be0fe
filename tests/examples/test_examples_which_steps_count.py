"""The example of which steps count, run as a user runs it, with fewer steps."""

import csv
import sys

import pytest
from support.python_process import ROOT, run_python

for package in ("mlxtend", "matplotlib", "tabulate", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install ms_lossscale[examples]")

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "which_steps_count" / "train.py"
STEPS, EVERY = 60, 2
ALL, BACKS_OFF, NO_SPIKES, MEANS, NONE = (
    "all three",
    "without backoff_if_loss_not_finite=False",
    "without skip_conditions=[NormSpike(...)]",
    "without weighted=True",
    "none of them",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    result = run_python(SCRIPT, "--steps", STEPS, "--output", "out", cwd=folder, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return result, folder / "out"


def test_each_keyword_does_its_part(run):
    """Of 60 steps, each tenth is spoilt by NaN, and one is a spike."""
    rows = [[entry.strip() for entry in line.strip("|\n").split("|")] for line in run[0].stdout.splitlines()[2:]]
    table = {name: (float(loss), *rest) for name, loss, *rest in rows}
    skipped, with_spike = "1 condition, 6 loss", "6 loss"
    assert {name: rest for name, (_, *rest) in table.items()} == {
        ALL: ["65536", "53", skipped],
        BACKS_OFF: ["1024", "53", skipped],
        NO_SPIKES: ["65536", "54", with_spike],
        MEANS: ["65536", "53", skipped],
        NONE: ["1024", "54", with_spike],
    }
    losses = {name: loss for name, (loss, *_) in table.items()}
    assert losses[NONE] > losses[ALL] + 0.2 and losses[NO_SPIKES] > losses[ALL] + 0.1
    assert losses[ALL] < 3


def test_it_writes_a_table_and_a_picture(run):
    result, folder = run
    assert {path.name for path in folder.iterdir()} == {"curves.png", "losses.csv"}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with open(folder / "losses.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [ALL, BACKS_OFF, NO_SPIKES, MEANS, NONE]
    expected = [(name, str(step)) for name in names for step in range(0, STEPS + 1, EVERY)]
    assert [(row["training"], row["step"]) for row in rows] == expected
    # All begin with the same weights.
    assert len({row["loss"] for row in rows if row["step"] == "0"}) == 1
    assert f"{5 * STEPS}/{5 * STEPS}" in result.stderr


def test_what_is_planted(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import text

    trained, tested = text.make_batches(0)
    assert len(tested) * 9 == pytest.approx(len(trained), rel=0.01)
    numbers = [batch.mask.sum() for batch in trained]
    assert min(numbers) < 100 and max(numbers) == text.LINES * text.LENGTH
    for batch in trained[:20]:
        assert batch.contexts.shape == (text.LINES * text.LENGTH, text.CONTEXT)
        # What comes next in one place is the last character of the context of the next one.
        lines = batch.characters.reshape(text.LINES, text.LENGTH)
        contexts = batch.contexts.reshape(text.LINES, text.LENGTH, text.CONTEXT)
        assert (contexts[:, 1:, -1] == lines[:, :-1]).all() and (contexts[:, 0] == 0).all()
    factors = [text.factor(step, call) for step in range(1, 101) for call in range(4)]
    assert sum(its != its for its in factors) == 10
    assert [i // 4 + 1 for i, its in enumerate(factors) if its > 1] == [25, 75]
    del sys.modules["text"]


def test_wrong_arguments(tmp_path):
    (tmp_path / "file").touch()
    for arguments, words in (
        (["--output", "file/out"], "can't write to the output folder"),
        (["--steps", "0"], "must be at least 1, but got 0"),
    ):
        result = run_python(SCRIPT, *arguments, cwd=tmp_path)
        assert result.returncode == 2 and words in result.stderr
    assert "--loss-weight" in run_python(SCRIPT, "--help", cwd=tmp_path).stdout
