"""plot_scale: a picture of what LossScaleMonitor wrote."""

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes
from support.bad_batches import bad, good, patient, steep, trained
from support.linear_pair import CELLS, Trained
from support.python_process import run_python
from support.retried_networks import inputs
from test_loss_scale_monitor import train
from test_summary import BATCHES, batches_for

from ms_lossscale import DynamicLossScale, LossScaleMonitor, NormSpike, SimultaneousTrainOneStepCell, plot_scale

module = sys.modules["ms_lossscale.plot_scale"]


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: from a line's label, all that it was drawn through, on the axes of the loss and of the scale."""
    lines, plot = {}, Axes.plot

    # A step plot is drawn through it, too.
    def recorded(axes, x, y, *args, **keywords):
        lines.setdefault(keywords["label"], []).append((list(x), list(y)))
        return plot(axes, x, y, *args, **keywords)

    monkeypatch.setattr(Axes, "plot", recorded)
    return lines


@pytest.mark.parametrize("kind", CELLS)
def test_what_it_draws(kind, drawn):
    trained = Trained(kind, scale_window=None if kind == "simultaneous" else 2)
    train(trained.cell, batches_for(kind), LossScaleMonitor(csv="scale.csv"))
    assert plot_scale("scale.csv", title="A training") == Path("scale.png")
    assert image.imread("scale.png").std() > 0.01
    if kind == "alternating":
        numbers, scales = drawn["network 0: loss scale"][0]
        assert (numbers, scales) == ([1, 2, 3, 4, 5], [1024.0, 1024.0, 512.0, 256.0, 256.0])
        assert drawn["network 1: loss scale"][0][1] == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0]
        assert drawn["network 0: skipped: the loss was not finite (2 steps)"][0][0] == [2, 3]
    else:
        assert drawn["loss scale"][0][0] == [1, 2, 3, 4, 5]
        assert drawn["skipped: the loss was not finite (2 steps)"][0][0] == [2, 3]
    assert not any("done again" in label for label in drawn)


def test_retries(drawn):
    trained = Trained("scaled", scale=2.0**24, max_retries=4)
    # The loss is about 2**120, and its gradients about 2**106: too much for float32 at this scale, not at lower ones.
    x, y = (np.ones(array.shape, np.float32) for array in batches_for("scaled")[0])
    train(trained.cell, [(x * np.float32(2.0**45), y * np.float32(2.0**60))], LossScaleMonitor(csv="scale.csv"))
    assert trained.cell.counters()["retries"] > 0
    assert trained.cell.counters()["skipped_steps"] == 0
    plot_scale("scale.csv", "picture.svg")
    assert Path("picture.svg").read_text().startswith("<?xml")
    assert drawn["done again at a lower scale (1 step)"][0][0] == [1]


def test_a_loss_scale_for_each_network(drawn):
    trained = Trained("simultaneous")
    scales = [DynamicLossScale(2.0**10), DynamicLossScale(2.0**12)]
    inputs = [(0, 2), (1, 2)]
    cell = SimultaneousTrainOneStepCell(trained.networks, trained.optimizers, scales, network_inputs=inputs).set_train()
    train(cell, BATCHES[:2], LossScaleMonitor(csv="scale.csv"))
    plot_scale("scale.csv")
    assert drawn["loss scale of network 0"][0][1] == [2.0**10] * 2
    assert drawn["loss scale of network 1"][0][1] == [2.0**12] * 2


# Files without a column for the reason, as earlier versions wrote them.
HEADER = "step,network,loss,loss_scale,skipped,applied_steps,skipped_steps,consecutive_skipped_steps,retries\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has no columns step, network, loss, loss_scale, skipped, retries"),
        ("", "has no columns"),
        (HEADER, "has no steps"),
        (
            HEADER + "1,0,0.5,1024.0,0,1,0,0,0\n2,0,0.2,1,0,0.5,1024.0,0,1,0,0,0\n",
            r"line 3 of 'scale\.csv' was not written by",
        ),
        (HEADER + "1,0,0.5,1024.0\n2,0,0.5,1024.0,0,1,0,0,0\n", r"line 2 of .*: '1,0,0\.5,1024\.0'\. Fix"),
        (HEADER + "1,0,0.5,1.0/2.0,0,1,0,0,0\n2,0,0.5,1.0,0,1,0,0,0\n", "different numbers of loss scales"),
        ("\x89PNG\n", "has no columns"),
    ],
)
def test_a_file_that_it_cannot_draw(text, message):
    Path("scale.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot_scale("scale.csv")
    assert not Path("scale.png").exists()


@pytest.mark.parametrize("part", ["2,0,0.2", "2,0,0.5,1024.0,0,1,0,0,", "2,0,0.5,1024.0,0,1,0,0,1"])
def test_a_line_that_is_being_written(drawn, part):
    Path("scale.csv").write_text(HEADER + "1,0,0.5,1024.0,0,1,0,0,0\n" + part)
    plot_scale("scale.csv")
    assert drawn["loss scale"][0] == ([1], [1024.0])


@pytest.mark.parametrize("kind", ["scaled", "alternating"])
def test_trainings_in_one_file_are_drawn_one_after_the_other(kind, drawn):
    trained = Trained(kind, scale_window=2)
    for _ in range(2):
        train(trained.cell, batches_for(kind), LossScaleMonitor(csv="scale.csv"))
    plot_scale("scale.csv")
    of_first = "network 0: " if kind == "alternating" else ""
    assert drawn[f"{of_first}loss scale"][0][0] == list(range(1, 11))
    assert drawn[f"{of_first}skipped: the loss was not finite (4 steps)"][0][0] == [2, 3, 7, 8]


def test_each_kind_of_skipped_steps_is_marked_differently(drawn, monkeypatch):
    marks, mark = {}, module._mark

    def recorded(axes, number, values, which, label, marker, color):
        if which.any():
            marks[label] = (marker, color)
        return mark(axes, number, values, which, label, marker, color)

    monkeypatch.setattr(module, "_mark", recorded)
    cell = trained(patient(), skip_conditions=[NormSpike(max_norm=10.0)])
    monitor = LossScaleMonitor(csv="scale.csv")
    with monitor.watching(cell):
        for batch in (good(), inputs(11.0), bad(), steep(), inputs(11.0)):
            monitor.after_step(*cell(*batch))
    plot_scale("scale.csv")
    assert drawn["skipped by a condition (2 steps)"][0][0] == [2, 5]
    assert drawn["skipped: the loss was not finite (1 step)"][0][0] == [3]
    assert drawn["skipped: overflow (1 step)"][0][0] == [4]
    assert len(marks) == len(set(marks.values())) == 3


def test_a_step_of_which_only_an_earlier_version_told(drawn):
    Path("scale.csv").write_text(HEADER + "1,0,0.5,1024.0,0,1,0,0,0\n2,0,0.5,1024.0,1,1,1,1,0\n")
    plot_scale("scale.csv")
    assert drawn["skipped: overflow (1 step)"][0][0] == [2]


@pytest.mark.parametrize("picture", ["picture", "picture.xyz", ""])
def test_a_picture_of_no_known_format(picture):
    Path("scale.csv").write_text(HEADER + "1,0,0.5,1024.0,0,1,0,0,0\n")
    with pytest.raises(ValueError, match=r"'picture' must end in one of .*\.png, .*, but got "):
        plot_scale("scale.csv", picture)
    assert [path.name for path in Path().iterdir()] == ["scale.csv"]


def test_no_file():
    with pytest.raises(FileNotFoundError, match=r"scale\.csv"):
        plot_scale("scale.csv")
    with pytest.raises(FileNotFoundError, match=r"'path' is 'scale\.csv', which can't be read: No such file .*csv="):
        plot_scale("scale.csv")
    with pytest.raises(IsADirectoryError, match=r"'path' is '\.', which can't be read: Is a directory\. Pass the file"):
        plot_scale(".")


def test_without_matplotlib(tmp_path):
    Path("scale.csv").write_text(HEADER + "1,0,0.5,1024.0,0,1,0,0,0\n")
    program = "import sys; sys.modules['matplotlib'] = None; import ms_lossscale; ms_lossscale.plot_scale('scale.csv')"
    result = run_python("-c", program, cwd=tmp_path)
    assert result.returncode == 1
    assert "Plotting a training needs matplotlib, which is not installed: pip install matplotlib" in result.stderr
