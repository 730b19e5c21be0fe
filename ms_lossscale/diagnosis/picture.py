"""Draws the picture of a report: where values lie in float16's range."""

import textwrap
from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale._output import matplotlib_figure, percent, replacing, written_scale
from ms_lossscale.diagnosis.distribution import FLOAT16, Distribution, sum_of

_MOST_ROWS, _LONGEST_NAME = 80, 48
_FONT_SIZE, _DPI = 13, 100
# Inches of a character, a row, the bars and a column.
_CHARACTER, _ROW, _BARS, _COLUMN = 0.1, 0.24, 2.6, 3.7

# The colors of Okabe and Ito, which colour-blind readers can distinguish; values are blue.
_BLUE, _DARK_RED, _PALE = "#0072B2", "#A63A00", "50"
_SMALLEST_EXPONENT = FLOAT16.min_exponent - FLOAT16.precision
# What float16 can't hold, or only as subnormal numbers: first and last exponent, color and hatching.
_REGIONS = {
    "float16 flushes to zero": (-np.inf, _SMALLEST_EXPONENT, "#D55E00", "////"),
    "subnormal in float16": (_SMALLEST_EXPONENT, FLOAT16.min_exponent, "#E69F00", None),
    "infinite in float16": (FLOAT16.max_exponent + 1, np.inf, "#CC79A7", "xxxx"),
}


class Picture(NamedTuple):
    """What to draw."""

    title: str
    # The power of two that the values are multiplied by in a column, by the column's title.
    scales: dict[str, float]
    # The meaning and the order of the rows.
    rows_are: str
    rows: list[tuple[str, Distribution]]
    warnings: list[str]
    # The loss scale to mark.
    recommended: Optional[float] = None


def draw(path, picture):
    """Draws histograms by binade: bars for all values, and a strip for each row."""
    make_figure = matplotlib_figure("Plotting a report")
    from matplotlib import rc_context

    sizes = {"font.size": _FONT_SIZE, "axes.titlesize": "medium", "figure.titlesize": "medium"}
    with rc_context(sizes), replacing(path) as part:
        _figure(make_figure, picture).savefig(part)


def _figure(make_figure, picture):
    rows = [(_shortened(name), distribution) for name, distribution in picture.rows[:_MOST_ROWS]]
    height = max(1.2, _ROW * len(rows))
    width = _CHARACTER * max(len(name) for name, _ in rows) + 1.6 + _COLUMN * len(picture.scales)
    lines = [line for text in picture.warnings for line in textwrap.wrap(text, int(width / _CHARACTER))]
    size = (width, _BARS + height + 2.1 + 0.22 * len(lines))
    figure = make_figure(figsize=size, dpi=_DPI, layout="constrained")
    figure.suptitle(picture.title, fontweight="bold")
    total = sum_of(distribution for _, distribution in picture.rows)
    columns = _Columns(total, picture.scales.values())
    grid = figure.subplots(
        2, len(picture.scales), sharex=True, sharey="row", squeeze=False, height_ratios=[_BARS, height]
    )
    for (bars, strips), (title, scale) in zip(grid.T, picture.scales.items()):
        bars.set_title(f"{title}\n{_what_float16_does(total, scale)}")
        bars.bar(columns.starts, columns.shares(total, scale), columns.widths, align="edge", color=_BLUE)
        shares = [columns.shares(distribution, scale) for _, distribution in rows]
        image = _draw_strips(strips, columns, shares)
        for axes in (bars, strips):
            columns.shade(axes)
    if picture.recommended is not None and total.max:
        _mark(grid[0, 0], np.log2(total.max), picture.recommended)
    grid[0, 0].set(ylabel="% of all values", yscale="log", ylim=(0.005, 200), yticks=[0.01, 0.1, 1, 10, 100])
    grid[0, 0].set_yticklabels(["0.01", "0.1", "1", "10", "100"])
    grid[1, 0].set_yticks(np.arange(len(rows)) + 0.5, [name for name, _ in rows])
    left_out = len(picture.rows) - len(rows)
    grid[1, 0].set_ylabel(picture.rows_are + (f" ({left_out} more left out)" if left_out else ""))
    bar = figure.colorbar(image, ax=grid[1, :], label="% of the row's values", shrink=min(1.0, 2.6 / height))
    bar.set_ticks([0, 10, 50, 100])
    legend = figure.legend(
        handles=_legend(), loc="outside lower center", ncols=3, frameon=False, title="\n".join(lines), alignment="left"
    )
    legend.get_title().set_color(_DARK_RED)
    return figure


def _what_float16_does(total, scale):
    flushed, subnormal, overflowed = map(percent, total.shares(scale))
    return (
        f"{percent(total.share_of_zeros)} % zero, {flushed} % flushed to zero,\n{subnormal} % subnormal, "
        f"{overflowed} % infinite"
    )


def _draw_strips(axes, columns, shares):
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("blues", ["#9ECAE9", _BLUE, "#00263D"])
    axes.set(xlabel="$\\log_2$ |value $\\times$ loss scale|", ylim=(len(shares), 0))
    return axes.pcolormesh(
        columns.edges,
        np.arange(len(shares) + 1),
        np.ma.masked_equal(shares, 0),
        cmap=colors,
        norm=PowerNorm(0.5, 0, 100),
        zorder=1,
    )


def _mark(axes, exponent, scale):
    """Draws an arrow from the largest value to where the recommended loss scale moves it."""
    axes.annotate("", (exponent + np.log2(scale), 60), (exponent, 60), arrowprops={"arrowstyle": "->", "lw": 2})
    axes.text(exponent + np.log2(scale) / 2, 75, f"$\\times$ {written_scale(scale)}", ha="center", va="bottom")


def _legend():
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=color + _PALE, edgecolor=color, linewidth=0, hatch=hatch, label=label)
        for label, (_, _, color, hatch) in _REGIONS.items()
    ]


class _Columns:
    """
    The horizontal axis: zero, float16's binades with two more at each end and all others that have values at one of the
    scales, and values that are not finite.
    """

    def __init__(self, total, scales):
        shown = [_SMALLEST_EXPONENT - 2, FLOAT16.max_exponent + 2]
        shown += [exponent + int(np.log2(scale)) for exponent in total.histogram() for scale in scales]
        self._low, self._high = min(shown), max(shown) + 1
        binades = np.arange(self._low, self._high + 1)
        self.edges = np.concatenate([[self._low - 4, self._low - 1], binades, [self._high + 1, self._high + 4]])
        self.starts, self.widths = self.edges[:-1], np.diff(self.edges)

    def shares(self, distribution, scale):
        """Returns the percentage of the values in each column when they are multiplied by the scale."""
        counts = np.zeros(len(self.starts))
        counts[0], counts[-1] = distribution.zeros, distribution.non_finite
        for exponent, count in distribution.histogram().items():
            counts[exponent + int(np.log2(scale)) - self._low + 2] = count
        return 100 * counts / max(distribution.count, 1)

    def shade(self, axes):
        for start, end, color, hatch in _REGIONS.values():
            start, end = max(start, self._low), min(end, self._high)
            axes.axvspan(start, end, facecolor=color + _PALE, edgecolor=color, linewidth=0, hatch=hatch, zorder=0)
        ticks = [each for each in range(-280, 280, 10) if self._low + 6 <= each < self._high - 2]
        axes.set_xticks([self._low - 2.5, *ticks, self._high + 2.5], ["zero", *ticks, "inf"])
        axes.set_xlim(self.edges[0], self.edges[-1])


def _shortened(name):
    """Returns a long name without its middle, since its end says most."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:15]}...{name[-(_LONGEST_NAME - 18) :]}"
