"""Draws a report: histograms of its values over float16's range."""

import textwrap

import numpy as np

from ms_lossscale._files import matplotlib_figure, replacing
from ms_lossscale._words import percent
from ms_lossscale.diagnosis.distribution import FLOAT16, sum_of

_MOST_ROWS = 80
# Inches of a character.
_CHARACTER = 0.1
# The colors of Okabe and Ito, which colour-blind readers can distinguish; values are blue.
_BLUE = "#0072B2"
_BLUES = ("#9ECAE9", _BLUE, "#00263D")
_SMALLEST_EXPONENT = FLOAT16.min_exponent - FLOAT16.precision
# What float16 can't hold, or only as subnormal numbers: first and last exponent, color and hatching.
_REGIONS = {
    "float16 flushes to zero": (-np.inf, _SMALLEST_EXPONENT, "#D55E00", "////"),
    "subnormal in float16": (_SMALLEST_EXPONENT, FLOAT16.min_exponent, "#E69F00", None),
    "infinite in float16": (FLOAT16.max_exponent + 1, np.inf, "#CC79A7", "xxxx"),
}


def draw(path, report):
    """Draws histograms by binade for each scale: bars for all values, and a strip for each row."""
    make_figure = matplotlib_figure("Plotting a report")
    from matplotlib import rc_context

    scales = report._shown_scales()
    rows = {first[0]: distribution for first, distribution in report._rows()}
    total = sum_of(rows.values())
    names = list(rows)[:_MOST_ROWS]
    height = max(1.2, 0.24 * len(names))
    width = _CHARACTER * max(map(len, names)) + 1.6 + 3.7 * len(scales)
    lines = [line for text in report._warnings() for line in textwrap.wrap(text, int(width / _CHARACTER))]
    with rc_context({"font.size": 13, "axes.titlesize": "medium", "figure.titlesize": "medium"}):
        size = (width, 4.7 + height + 0.22 * len(lines))
        figure = make_figure(figsize=size, dpi=100, layout="constrained")
        figure.suptitle(report._title(), fontweight="bold")
        grid = figure.subplots(2, len(scales), sharex=True, sharey="row", squeeze=False, height_ratios=[2.6, height])
        image = _fill(grid, scales, total, [rows[name] for name in names])
        grid[0, 0].set(ylabel="% of all values", yscale="log", ylim=(0.005, 200))
        grid[1, 0].set_yticks(np.arange(len(names)) + 0.5, names)
        grid[1, 0].set_ylabel(f"{len(rows) - len(names)} more are left out" if len(rows) > len(names) else "")
        bar = figure.colorbar(image, ax=grid[1, :], label="% of the row's values", shrink=min(1.0, 2.6 / height))
        bar.set_ticks([0, 10, 50, 100])
        place = {"loc": "outside lower center", "ncols": 3, "frameon": False, "alignment": "left"}
        regions = [grid[0, 0].patches[-i] for i in range(len(_REGIONS), 0, -1)]
        legend = figure.legend(regions, _REGIONS, title="\n".join(lines), **place)
        legend.get_title().set_color("#A63A00")
        with replacing(path) as part:
            figure.savefig(part)


def _fill(grid, scales, total, distributions):
    """Draws what was counted, in a column for each scale. Returns one of the images, for their colors."""
    from matplotlib import colors

    shifts = {scale: int(np.log2(scale)) for scale in scales}
    exponents = [exponent + shift for exponent in total.histogram() for shift in shifts.values()]
    low = min([_SMALLEST_EXPONENT - 2, *exponents])
    high = max([FLOAT16.max_exponent + 2, *exponents]) + 1
    # Zero, a gap, the binades, a gap, and what is not finite.
    edges = np.array([low - 4, low - 1, *range(low, high + 1), high + 1, high + 4])
    ticks = [tick for tick in range(-280, 280, 10) if low + 6 <= tick < high - 2]

    def shares(distribution, scale):
        histogram = distribution.histogram()
        counts = [histogram.get(exponent - shifts[scale], 0) for exponent in range(low, high)]
        return 100 * np.array([distribution.zeros, 0, *counts, 0, distribution.non_finite]) / max(distribution.count, 1)

    look = {"cmap": colors.LinearSegmentedColormap.from_list("blues", _BLUES), "norm": colors.PowerNorm(0.5, 0, 100)}
    for (bars, strips), (scale, name) in zip(grid.T, scales.items()):
        zero, flushed, subnormal, infinite = map(percent, (total.share_of_zeros, *total.shares(scale)))
        said = f"{zero} % zero, {flushed} % flushed to zero,\n{subnormal} % subnormal, {infinite} % infinite"
        bars.set_title(f"{name}\n{said}")
        bars.bar(edges[:-1], shares(total, scale), np.diff(edges), align="edge", color=_BLUE)
        strip = np.ma.masked_equal([shares(distribution, scale) for distribution in distributions], 0)
        image = strips.pcolormesh(edges, np.arange(len(distributions) + 1), strip, zorder=1, **look)
        strips.set(xlabel="$\\log_2$ |value $\\times$ loss scale|", ylim=(len(distributions), 0))
        for axes in (bars, strips):
            for start, end, color, hatch in _REGIONS.values():
                looks = {"facecolor": f"{color}50", "edgecolor": color, "linewidth": 0, "hatch": hatch}
                axes.axvspan(max(start, low), min(end, high), zorder=0, **looks)
            axes.set_xticks([low - 2.5, *ticks, high + 2.5], ["zero", *ticks, "inf"])
            axes.set_xlim(edges[0], edges[-1])
    return image
