"""GradientReport: the recommended loss scale, the table, CSV, JSON and the plot. Made here without a network."""

import csv
import dataclasses
import io
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from mindspore import dtype as mstype
from support.numpy_casts import CASTS, shares_of_cast

from ms_lossscale import GradientReport
from ms_lossscale.diagnosis.distribution import Distribution

LARGEST = {mstype.float16: 65504.0, mstype.bfloat16: 2.0**127 * (2 - 2.0**-7)}


def report_of(parameters, loss_scale=1.0, clip_norm=None, non_finite_losses=0, step=None):
    """A report of these gradients, by parameter."""
    distributions = {}
    for name, values in parameters.items():
        distributions[name] = Distribution()
        distributions[name].add(np.asarray(values, np.float32))
    together = np.concatenate([np.ravel(np.asarray(values, np.float32)) for values in parameters.values()])
    sizes = np.abs(together[np.isfinite(together) & (together != 0)])
    largest = float(sizes.max()) if sizes.size else None
    return GradientReport(distributions, 1, loss_scale, clip_norm, largest, non_finite_losses, step)


def sizes(exponents, signs=1):
    return signs * 2.0 ** np.asarray(exponents, np.float64)


# From the worst: all flushed at scale 1, half of it, subnormal only, nothing.
PARAMETERS = {
    "fine": sizes([-10, -3, 0, 1], -1),
    "half": sizes([-30, -3, -40, 1]),
    "subnormal": sizes([-20, -3, -18, 1]),
    "all": sizes([-30, -35, -33, -40]),
}
WORST_FIRST = ["all", "half", "subnormal", "fine"]
REPORT = report_of(PARAMETERS)
ALL = np.concatenate(list(PARAMETERS.values())).astype(np.float32)


@given(
    st.floats(width=32, min_value=2.0**-149, max_value=float(np.finfo(np.float32).max), allow_subnormal=True),
    st.integers(0, 13),
)
@settings(max_examples=200, deadline=None)
def test_recommends_the_largest_power_of_two_with_headroom(largest, headroom):
    report = report_of({"weight": [largest, 0.0]})
    for dtype in CASTS:
        advice = report.recommend(headroom, dtype)
        assert (advice.headroom, advice.largest) == (headroom, largest)
        limit = LARGEST[dtype] / 2.0**headroom
        assert math.frexp(advice.loss_scale)[0] == 0.5
        assert largest * advice.loss_scale <= limit
        assert largest * advice.loss_scale * 2 > limit or advice.loss_scale == 2.0**126


@pytest.mark.parametrize("dtype", CASTS)
def test_what_the_recommended_scale_saves_and_loses(dtype):
    values = np.concatenate([ALL, np.float32([2.0**-140, 2.0**-133, 0.0])])
    advice = report_of({"weight": values}).recommend(dtype=dtype)
    before, after = (shares_of_cast(values, scale, dtype) for scale in (1.0, advice.loss_scale))
    assert after.overflowed == 0
    assert advice.lost == after.flushed
    assert advice.saved == before.flushed - after.flushed > 0


def test_two_binades_are_left_by_default_and_clipping_comes_after():
    assert REPORT.recommend() == REPORT.recommend(2, mstype.float16)
    assert REPORT.recommended_loss_scale == REPORT.recommend().loss_scale == 2.0**12
    report = GradientReport(REPORT.parameters, 1, 1.0, 0.5, 2.0**8, 0, None)
    assert report.recommended_loss_scale == 2.0**5


WHY_NOT = {
    "zeros": (report_of({"weight": np.zeros(3)}), r"all gradients are zero\. Profile again with a larger loss_scale"),
    "overflow": (
        report_of({"weight": [1.0, np.inf], "bias": [np.nan]}, loss_scale=1024.0),
        r"2 gradients are not finite at loss scale 1024\. Profile again at a smaller loss_scale.*locate_overflow",
    ),
    "loss": (
        report_of({"weight": [1.0, np.inf]}, non_finite_losses=1),
        r"in 1 of 1 batches the loss is not finite\. .*locate_overflow names the cell",
    ),
}


@pytest.mark.parametrize("report, why", WHY_NOT.values(), ids=WHY_NOT)
def test_says_why_no_scale_can_be_recommended(report, why):
    message = f"No loss scale can be recommended: {why}"
    with pytest.raises(ValueError, match=message):
        report.recommend()
    content = json.loads(report.to_json())
    assert content["recommendation"] is None
    assert f"No loss scale can be recommended: {content['why_no_recommendation']}" in str(report)
    assert "flushed_at_1" in report.to_csv()


@pytest.mark.parametrize("headroom, error", [("2", TypeError), (-1, ValueError), (1.5, ValueError)])
def test_a_wrong_headroom(headroom, error):
    with pytest.raises(error, match=f"'headroom' must be .*, but got {headroom!r}"):
        REPORT.recommend(headroom)


def test_worst_first():
    assert REPORT.worst_first() == WORST_FIRST
    # bfloat16 holds all of them: the order stays.
    assert REPORT.worst_first(mstype.bfloat16) == list(PARAMETERS)
    assert report_of({"good": [1.0], "bad": [1.0, np.nan]}).worst_first() == ["bad", "good"]
    assert report_of({"good": [1.0], "without values": []}).worst_first() == ["good", "without values"]


def test_the_printed_table():
    lines = str(REPORT).splitlines()
    assert lines[0] == (
        "Unscaled gradients of 4 parameters in 1 batch, computed at loss scale 1 in training mode; what float16 does "
        "to them at loss scale 1 and 4096"
    )
    header, *rows = lines[2:8]
    assert [row.split()[0] for row in rows] == [*WORST_FIRST, "all"]
    numbers = "4 0.00 0 9.09e-13 9.31e-10 100.00 0.00 0.00 25.00 75.00 0.00"
    assert " ".join(rows[0].split()) == f"all {numbers}"
    # Columns are aligned: all rows end where the header ends.
    assert {len(row) for row in rows} == {len(header)}
    flushed = [shares_of_cast(ALL, scale).flushed for scale in (1.0, 4096.0)]
    assert lines[9] == (
        "Recommended loss scale for float16: 4096. It brings the largest gradient, 2.00e+00, to 8192, 2 binades "
        f"or more below 65504; saves {100 * (flushed[0] - flushed[1]):.2f} % of all values from being flushed to zero "
        f"or overflowing, and still loses {100 * flushed[1]:.2f} %."
    )
    assert lines[10] == "bfloat16 without a loss scale would flush 0.00 % of all values to zero."
    # A small share never looks like none.
    values = np.where(np.arange(10**6) == 0, 2.0**-30, 1.0)
    assert str(report_of({"weight": values})).splitlines()[3].split()[6] == "<0.01"


def test_csv():
    report = report_of({**PARAMETERS, "zeros": [0.0, 0.0], 'a "name", so': [1.0]})
    text = report.to_csv("report.csv")
    with open("report.csv", newline="") as file:
        assert file.read() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["parameter"] for row in rows] == report.worst_first()
    for row in rows:
        its = report.parameters[row["parameter"]]
        expected = {name: its.as_dict()[name] for name in ("count", "zeros", "non_finite", "min", "max")}
        for scale in (1.0, report.recommended_loss_scale):
            expected.update({f"{name}_at_{scale:g}": share for name, share in its.shares(scale)._asdict().items()})
        assert {name: float(row[name]) if row[name] else None for name in expected} == expected


def test_json():
    report = report_of(PARAMETERS, loss_scale=1024.0, clip_norm=1.0, step=7)
    content = json.loads(report.to_json(), parse_constant=pytest.fail)
    for name in ("batches", "loss_scale", "clip_norm", "step", "largest", "non_finite_losses"):
        assert content[name] == getattr(report, name)
    assert content["recommendation"] == report.recommend()._asdict()
    for name, its in report.parameters.items():
        assert content["parameters"][name] == json.loads(json.dumps(its.as_dict()))


@pytest.mark.parametrize("method", ["to_csv", "to_json", "plot"])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(method, tmp_path, monkeypatch):
    path = tmp_path / "report.png"
    path.write_text("an earlier report")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr("os.replace", None)
        getattr(REPORT, method)(path)
    assert path.read_text() == "an earlier report"
    getattr(REPORT, method)(str(path))
    assert path.read_bytes() != b"an earlier report"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("smallest", "ceiling", "points"), [(2.0**-60, None, True), (2.0**-20, None, False), (2.0**-20, 256.0, True)]
)
def test_what_no_single_scale_serves_points_to_advise_float32(smallest, ceiling, points):
    report = report_of({"large": [1.0] * 98, "small": [smallest] * 2})
    text = str(dataclasses.replace(report, ceiling=ceiling))
    assert text.endswith("advise_float32 says which cells to compute in float32.") == points
    assert ("still flushes 2.00 % of all values to zero" in text) == (smallest == 2.0**-60)


def test_the_plot_shows_zeros_what_is_not_finite_the_recommended_scale_and_warnings(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), open(path, "w").close()))
    report = report_of({"lost": [0.0, 0.0, 0.0, 2.0**-24], "kept": [2.0**-20] * 4})
    report = dataclasses.replace(report, quantised=["lost"])
    printed = str(report).splitlines()[-1]
    assert report.recommended_loss_scale == 2.0**33 and "Profile again with loss_scale=2**33 " in printed
    for its, heights, words in (
        (report, (37.5, 0.0), printed),
        (report_of({"weight": [1.0, 0.0, np.inf, np.nan]}), (25.0, 50.0), "No loss scale can be recommended: 2 gradi"),
    ):
        its.plot("report.png")
        labels = figures[-1].axes[-2].get_xticklabels()
        assert (labels[0].get_text(), labels[-1].get_text()) == ("zero", "inf")
        bars = sorted(figures[-1].axes[0].containers[0], key=lambda bar: bar.get_x())
        assert (bars[0].get_height(), bars[-1].get_height()) == heights
        assert " ".join(figures[-1].legends[0].get_title().get_text().split()).startswith(words)
    assert "37.50 % zero, 0.00 % flushed to zero" in figures[0].axes[0].get_title()
    shares = figures[0].axes[2].collections[0].get_array()
    assert [shares[row, 0] for row in (0, 1)] == [np.ma.masked, 75.0]


def test_plotting_without_matplotlib(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs matplotlib, which is not installed: pip install matplotlib"):
        REPORT.plot("report.png")
    assert list(tmp_path.iterdir()) == []


def test_the_old_name_of_clip_norm_is_told():
    report = report_of(PARAMETERS, clip_norm=0.5)
    with pytest.warns(FutureWarning, match="'clip' is called 'clip_norm'") as caught:
        assert report.clip == report.clip_norm == 0.5
    assert caught[0].filename == __file__
