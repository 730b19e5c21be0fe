"""What all reports have in common: a table, files, and a picture of where values lie in float16's range."""

import json
from typing import Any, NamedTuple, Optional

import numpy as np

from ms_lossscale._arguments import StrPath
from ms_lossscale._output import csv_text, matplotlib_figure, percent, replacing, size, write_text
from ms_lossscale.diagnosis.distribution import FLOAT16, Distribution

_MOST_ROWS = 80
_LONGEST_NAME = 48

# The columns of a table that show a Distribution, and then, at each loss scale, what float16 does to it.
COLUMNS = ["values", "zero %", "non-finite", "min", "max"]


def columns_of(distribution, scales=(1.0,)):
    """What stands in the columns: those of the counts, and for each loss scale flushed, subnormal, overflowed."""
    d = distribution
    zeros = d.zeros / d.count if d.count else 0.0
    counts = [f"{d.count:,}", percent(zeros), f"{d.non_finite:,}", size(d.min), size(d.max)]
    return counts + [percent(share) for scale in scales for share in d.shares(scale)]


class Picture(NamedTuple):
    """
    What to draw.

    - **title** (str) - What it shows.
    - **scales** (dict) - From a column's title to the power of two that the values are multiplied by in it.
    - **rows_are** (str) - What the rows are, and in which order.
    - **rows** (list[tuple[str, Distribution]]) - Their names and values.
    """

    title: str
    scales: dict[str, float]
    rows_are: str
    rows: list[tuple[str, Distribution]]


class Report:
    """Base class of the reports. A subclass says what is in the files."""

    def to_csv(self, path: Optional[StrPath] = None) -> str:
        """
        The rows of the table, in its order.

        Args:
            path (str, optional): Where to write it, as a whole or not at all. Default: ``None`` , nowhere.

        Returns:
            str, the CSV text.
        """
        return write_text(path, csv_text(*self._header_and_rows()))

    def to_json(self, path: Optional[StrPath] = None) -> str:
        """
        All that the report knows, with the histograms.

        Args:
            path (str, optional): Where to write it, as a whole or not at all. Default: ``None`` , nowhere.

        Returns:
            str, the JSON text.
        """
        return write_text(path, json.dumps(self._content(), indent=1))

    def plot(self, path: StrPath) -> None:
        """
        Draws the histograms, all together and by row of the table, in its order, with what float16 can't hold shaded.

        Args:
            path (str): The picture to write; its ending is its format, `.png` say.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        _draw(path, self._picture())

    def _header_and_rows(self) -> tuple[list[str], list[list]]:
        raise NotImplementedError

    def _content(self) -> dict[str, Any]:
        raise NotImplementedError

    def _picture(self) -> Picture:
        raise NotImplementedError


def sum_of(distributions):
    """A distribution that counts what all of these do."""
    total = Distribution()
    for distribution in distributions:
        total.merge(distribution)
    return total


def _draw(path, picture):
    """Draws histograms by binade: of all values as bars, and of each row as a strip."""
    make_figure = matplotlib_figure("Plotting a report")
    total = sum_of(distribution for _, distribution in picture.rows)
    rows = [(_shortened(name), distribution) for name, distribution in picture.rows[:_MOST_ROWS]]
    binades = _binades(total, picture.scales.values())
    height_of_bars, height_of_strips = 2.6, max(1.2, 0.21 * len(rows))
    # Inches: the names, the colorbar, and for each scale what its title takes.
    width = 0.065 * max(len(name) for name, _ in rows) + 1.5 + 4.3 * len(picture.scales)
    figure = make_figure(figsize=(width, height_of_bars + height_of_strips + 2.0), dpi=110, layout="constrained")
    figure.suptitle(picture.title, fontsize=12)
    ratios = [height_of_bars, height_of_strips]
    axes = figure.subplots(2, len(picture.scales), sharex=True, sharey="row", squeeze=False, height_ratios=ratios)
    image = None
    for column, (name, scale) in enumerate(picture.scales.items()):
        bars, strips = axes[:, column]
        shares = total.shares(scale)
        bars.set_title(
            f"{name}\nfloat16: {percent(shares.flushed)} % flushed to zero,\n{percent(shares.subnormal)} % subnormal, "
            f"{percent(shares.overflowed)} % overflow",
            fontsize=9,
        )
        heights = 100 * _shifted(total, scale, binades)
        bars.bar(binades, heights, width=1.0, align="edge", color="tab:blue", edgecolor="white", linewidth=0.3)
        image = _draw_strips(strips, rows, scale, binades)
        for each in (bars, strips):
            _shade(each, binades)
    axes[0, 0].set_ylabel("% of all values")
    axes[1, 0].set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    left_out = len(picture.rows) - len(rows)
    axes[1, 0].set_ylabel(picture.rows_are + (f" ({left_out} more left out)" if left_out else ""))
    figure.colorbar(image, ax=axes[1, :], label="% of the row's values", shrink=min(1.0, 3.0 / height_of_strips))
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, fontsize=8)
    with replacing(path) as part:
        figure.savefig(part)


def _draw_strips(axes, rows, scale, binades):
    shares = 100 * np.array([_shifted(distribution, scale, binades) for _, distribution in rows])
    image = axes.imshow(
        np.ma.masked_equal(shares, 0),
        aspect="auto",
        extent=(binades[0], binades[-1] + 1, len(rows) - 0.5, -0.5),
        cmap="viridis_r",
        vmin=0,
        vmax=max(1e-7, np.max(shares, initial=0.0)),
        interpolation="nearest",
        zorder=1,
    )
    middle = (binades[0] + binades[-1] + 1) / 2
    for i, (_, distribution) in enumerate(rows):
        if distribution.is_all_zero:
            axes.text(middle, i, "all zero", ha="center", va="center", fontsize=7, color="tab:red")
    axes.set_xlabel("$\\log_2$ |value $\\times$ loss scale|")
    return image


_SMALLEST_EXPONENT = FLOAT16.min_exponent - FLOAT16.precision

# What float16 can't hold, or not as a normal number: from which exponent on, to which, in which color, how opaque.
_REGIONS = {
    "float16 flushes to zero": (-np.inf, _SMALLEST_EXPONENT, "tab:red", 0.25),
    "subnormal in float16": (_SMALLEST_EXPONENT, FLOAT16.min_exponent, "tab:orange", 0.2),
    "beyond 65504: infinite": (FLOAT16.max_exponent + 1, np.inf, "tab:purple", 0.25),
}


def _shade(axes, binades):
    low, high = binades[0], binades[-1] + 1
    for start, end, color, alpha in _REGIONS.values():
        axes.axvspan(max(start, low), min(end, high), color=color, alpha=alpha, linewidth=0, zorder=0)
    axes.set_xlim(low, high)


def _legend():
    from matplotlib.patches import Patch

    return [Patch(color=color, alpha=alpha, label=label) for label, (_, _, color, alpha) in _REGIONS.items()]


def _binades(total, scales):
    """The exponents to show: float16's own with two at each end, and all that have values at one of the scales."""
    shown = [_SMALLEST_EXPONENT - 2, FLOAT16.max_exponent + 2]
    shown += [exponent + int(np.log2(scale)) for exponent in total.histogram() for scale in scales]
    return np.arange(min(shown), max(shown) + 1)


def _shifted(distribution, scale, binades):
    """The shares of all values that lie in each of the binades when they are multiplied by the scale."""
    shares = np.zeros(len(binades))
    for exponent, count in distribution.histogram().items():
        shares[exponent + int(np.log2(scale)) - binades[0]] = count / distribution.count
    return shares


def _shortened(name):
    """A long name without its middle, since its end says most."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:15]}...{name[-(_LONGEST_NAME - 18) :]}"
