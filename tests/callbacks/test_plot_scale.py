"""plot_scale: a picture of what LossScaleMonitor wrote."""

from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.axes import Axes
from support.python_process import run_python

from ms_lossscale import plot_scale

HEADER = (
    "step,network,loss,loss_scale,skipped,applied_steps,skipped_steps,consecutive_skipped_steps,next_loss_scale,"
    "overflowed_parameters,retries,skip_reasons\n"
)


def write(*rows):
    """Writes rows of (step, network, loss, loss scale, skipped, retries, reasons)."""
    lines = [
        f"{step},{i},{loss},{scale},{skip},0,0,0,1,,{retries},{why}\n"
        for step, i, loss, scale, skip, retries, why in rows
    ]
    Path("scale.csv").write_text(HEADER + "".join(lines))


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: from a line's label, all that it was drawn through, on the axes of the loss and of the scale."""
    lines, plot = {}, Axes.plot

    # A step plot is drawn through it, too.
    def recorded(axes, x, y, *args, **keywords):
        lines.setdefault(keywords["label"], []).append((list(x), list(y), args, keywords["color"]))
        return plot(axes, x, y, *args, **keywords)

    monkeypatch.setattr(Axes, "plot", recorded)
    return lines


def test_what_it_draws(drawn):
    write(
        (1, 0, 0.5, 1024.0, 0, 0, ""),
        (2, 0, 0.5, 1024.0, 1, 0, "condition"),
        (3, 0, "nan", 1024.0, 1, 0, "loss"),
        (4, 0, 0.3, 512.0, 1, 2, "gradients"),
        (5, 0, 0.2, 256.0, 0, 1, ""),
        (6, 0, 0.2, 256.0, 2, 0, "condition loss"),
        (7, 0, 0.2, 256.0, 1, 0, "detector"),
    )
    assert plot_scale("scale.csv", title="A training") == Path("scale.png")
    assert image.imread("scale.png").std() > 0.01
    assert drawn["loss scale"][0][:2] == ([*range(1, 8)], [1024.0] * 3 + [512.0] + [256.0] * 3)
    assert drawn["mean of the last 1 step"][0][1][3:] == [0.3, 0.2, 0.2, 0.2]
    marked = {
        "skipped by a condition (2 steps)": [2, 6],
        "skipped: the loss was not finite (2 steps)": [3, 6],
        "skipped: overflow (2 steps)": [4, 7],
        "done again at a lower scale (1 step)": [5],
    }
    # On both axes, each with a mark of its own.
    assert {label: [its[0] for its in drawn[label]] for label in marked} == {it: [at] * 2 for it, at in marked.items()}
    assert len({drawn[label][0][2:] for label in marked}) == 4
    assert len(drawn) == 3 + len(marked)


def test_networks_and_trainings_one_after_the_other(drawn):
    write(*[(step, i, 0.5, 2.0 ** (i + step), i, 0, "") for _ in range(2) for step in (1, 2) for i in (0, 1)])
    assert plot_scale("scale.csv", "picture.svg") == Path("picture.svg")
    assert "4 steps" in str([*drawn]) and Path("picture.svg").read_text().startswith("<?xml")
    assert drawn["network 0: loss scale"][0][:2] == ([1, 2, 3, 4], [2.0, 4.0, 2.0, 4.0])
    assert drawn["network 1: loss scale"][0][1] == [4.0, 8.0, 4.0, 8.0]
    # Files of earlier versions have no reason.
    assert drawn["network 1: skipped: overflow (4 steps)"][0][0] == [1, 2, 3, 4]


def test_a_loss_scale_for_each_network_in_a_file_of_an_earlier_version_that_is_being_written(drawn):
    header = HEADER.replace(",skip_reasons", "")
    Path("scale.csv").write_text(f"{header}1,0,0.5,1024.0/4096.0,1,1,0,0,1,,0\n2,0,0.5,1024.0/4096.0,0,0")
    plot_scale("scale.csv")
    assert drawn["loss scale of network 0"][0][:2] == ([1], [2.0**10])
    assert drawn["loss scale of network 1"][0][:2] == ([1], [2.0**12])
    assert drawn["skipped: overflow (1 step)"][0][0] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"must be a CSV file of LossScaleMonitor, but 'scale\.csv' has the row {'a': '1', 'b': '2'}"),
        (HEADER, "has no steps yet"),
        (HEADER + "1,0,0.5,1024.0,0,1,0,0,1,,0,,9\n", "must be a CSV file of LossScaleMonitor, but"),
        (HEADER + "1,0,0.5,1024.0\n2,0,0.5,1024.0,0,1,0,0,1,,0,\n", "but .* has the row .* Pass another file, or de"),
        (HEADER + "1,0,0.5,1.0/2.0,0,1,0,0,1,,0,\n2,0,0.5,1.0,0,1,0,0,1,,0,\n", "different numbers of loss scales"),
    ],
)
def test_a_file_that_it_cannot_draw(text, message):
    Path("scale.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot_scale("scale.csv")
    assert not Path("scale.png").exists()


def test_other_files(tmp_path):
    write((1, 0, 0.5, 1024.0, 0, 0, ""))
    for picture in ("picture", "picture.xyz", ""):
        with pytest.raises(ValueError, match=r"'picture' must end in one of .*\.png, .*, but got "):
            plot_scale("scale.csv", picture)
    with pytest.raises(IsADirectoryError, match=r"'\.'"):
        plot_scale(".")
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        plot_scale("none.csv")
    program = "import sys; sys.modules['matplotlib'] = None; import ms_lossscale; ms_lossscale.plot_scale('scale.csv')"
    result = run_python("-c", program, cwd=tmp_path)
    assert result.returncode == 1
    assert "Plotting a training needs matplotlib, which is not installed: pip install matplotlib" in result.stderr
    assert [path.name for path in Path().iterdir()] == ["scale.csv"]
