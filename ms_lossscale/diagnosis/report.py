"""What the reports have in common: a table, files and a picture of where values lie in float16's range."""

import json
import textwrap
from typing import Any, NamedTuple, Optional

import numpy as np

from ms_lossscale._arguments import StrPath
from ms_lossscale._output import (
    csv_text,
    matplotlib_figure,
    percent,
    replacing,
    size,
    text_table,
    write_text,
    written_scale,
)
from ms_lossscale.diagnosis.distribution import COUNTS, FLOAT16, Distribution, sum_of

# A smaller share of values out of range is not notable.
NOTABLE_SHARE = 0.01

# The columns of a table that show a Distribution, and then, at each loss scale, what float16 does to it.
COLUMNS = ["values", "zero %", "non-finite", "min", "max"]


def columns_of(distribution, scales=(1.0,)):
    """Returns the columns' texts: counts, and flushed, subnormal and overflowed for each loss scale."""
    d = distribution
    counts = [f"{d.count:,}", percent(d.share_of_zeros), f"{d.non_finite:,}", size(d.min), size(d.max)]
    return counts + [percent(share) for scale in scales for share in d.shares(scale)]


def numbers_of(distribution, scales=(1.0,)):
    """Returns the same as numbers, for a CSV file."""
    counts = [getattr(distribution, count) for count in COUNTS]
    return counts + [share for scale in scales for share in distribution.shares(scale)]


def one_or_each(scales):
    """Returns the loss scale if all of these are the same, otherwise a list of them."""
    return scales[0] if len(set(scales)) == 1 else scales


def written_scales(loss_scale):
    """Returns a loss scale, or a list of them, as text."""
    return " and ".join(map(written_scale, loss_scale if isinstance(loss_scale, list) else [loss_scale]))


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


class Report:
    """Base class of the reports. A subclass says what is in the text and in the files."""

    def __str__(self) -> str:
        return "\n".join([self._headline(), "", text_table(*self._table()), "", *self._remarks()])

    def to_csv(self, path: Optional[StrPath] = None) -> str:
        """
        Returns the rows of the table, in its order, and writes them to a file if you give one.

        Args:
            path (str, optional): A file to write the text to, as a whole or not at all. Default: ``None`` .

        Returns:
            str, the CSV text.
        """
        return write_text(path, csv_text(*self._header_and_rows()))

    def to_json(self, path: Optional[StrPath] = None) -> str:
        """
        Returns everything that the report knows, with the histograms, and writes it to a file if you give one.

        Args:
            path (str, optional): A file to write the text to, as a whole or not at all. Default: ``None`` .

        Returns:
            str, the JSON text.
        """
        return write_text(path, json.dumps(self._content(), indent=1))

    def plot(self, path: StrPath) -> None:
        """
        Draws the histograms: one of all values, and one for each row of the table, in its order. Zeros and values that
        are not finite have their own columns, what float16 can't hold is shaded, and the printed warnings stand below.

        Args:
            path (str): The picture to write. Its ending decides the format, for example ``.png`` .

        Raises:
            ImportError: If matplotlib is not installed.
        """
        _draw(path, self._picture())

    def _content(self):
        further = self._further_content()
        fields = {name: value for name, value in vars(self).items() if name not in further}
        return {**fields, **further}

    def _headline(self) -> str:
        raise NotImplementedError

    def _table(self) -> tuple[list[str], list[list[str]]]:
        raise NotImplementedError

    def _remarks(self) -> list[str]:
        raise NotImplementedError

    def _header_and_rows(self) -> tuple[list[str], list[list]]:
        raise NotImplementedError

    def _further_content(self) -> dict[str, Any]:
        raise NotImplementedError

    def _picture(self) -> Picture:
        raise NotImplementedError


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


def _draw(path, picture):
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
