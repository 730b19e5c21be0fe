"""Drawing where values lie in float16's range."""

import numpy as np

from ms_lossscale._output import matplotlib_figure, percent, replacing
from ms_lossscale.diagnosis.float_format import FLOAT16

_MOST_ROWS = 80
_LONGEST_NAME = 48


def plot_report(path, title, columns, rows_are, rows, total):
    """
    Draws histograms by binade: of all values as bars, and of each row as a strip.

    Args:
        path (str): The picture to write.
        title (str): What it shows.
        columns (dict): From a column's title to the power of two that the values are multiplied by in it.
        rows_are (str): What the rows are, and in which order.
        rows (list[tuple[str, Distribution]]): Their names and values.
        total (Distribution): All values.
    """
    make_figure = matplotlib_figure("Plotting a report")
    scales = list(columns.values())
    left_out = len(rows) - _MOST_ROWS
    rows = [(_shortened(name), distribution) for name, distribution in rows[:_MOST_ROWS]]
    low, high = _range(total, scales)
    height_of_bars, height_of_strips = 2.6, max(1.2, 0.21 * len(rows))
    # Inches: the names, the colorbar, and for each scale what its title takes.
    width = 0.065 * max(len(name) for name, _ in rows) + 1.5 + 4.3 * len(scales)
    figure = make_figure(figsize=(width, height_of_bars + height_of_strips + 2.0), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(
        2, len(scales), sharex=True, sharey="row", squeeze=False, height_ratios=[height_of_bars, height_of_strips]
    )
    image = None
    for column, (name, scale) in enumerate(columns.items()):
        bars, strips = axes[:, column]
        shares = total.shares(scale)
        bars.set_title(
            f"{name}\nfloat16: {percent(shares.flushed)} % flushed to zero,\n{percent(shares.subnormal)} % subnormal, "
            f"{percent(shares.overflowed)} % overflow",
            fontsize=9,
        )
        exponents = np.arange(low, high + 1)
        counts = _shifted(total, scale, low, high)
        bars.bar(exponents, 100 * counts, width=1.0, align="edge", color="tab:blue", edgecolor="white", linewidth=0.3)
        strips_of = np.array([_shifted(distribution, scale, low, high) for _, distribution in rows])
        image = strips.imshow(
            np.ma.masked_equal(100 * strips_of, 0),
            aspect="auto",
            extent=(low, high + 1, len(rows) - 0.5, -0.5),
            cmap="viridis_r",
            vmin=0,
            vmax=max(1e-9, 100 * max(np.max(strips_of, initial=0.0), 1e-9)),
            interpolation="nearest",
            zorder=1,
        )
        for i, (_, distribution) in enumerate(rows):
            if distribution.is_all_zero:
                strips.text((low + high + 1) / 2, i, "all zero", ha="center", va="center", fontsize=7, color="tab:red")
        for each in (bars, strips):
            _shade(each, low, high)
        strips.set_xlabel("$\\log_2$ |value $\\times$ loss scale|")
    bars = axes[0, 0]
    bars.set_ylabel("% of all values")
    strips = axes[1, 0]
    strips.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    strips.set_ylabel(rows_are + (f" ({left_out} more left out)" if left_out > 0 else ""))
    figure.colorbar(image, ax=axes[1, :], label="% of the row's values", shrink=min(1.0, 3.0 / height_of_strips))
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, fontsize=8)
    with replacing(path) as part:
        figure.savefig(part)


_FLUSHED, _SUBNORMAL, _OVERFLOW = ("tab:red", 0.25), ("tab:orange", 0.2), ("tab:purple", 0.25)


def _shade(axes, low, high):
    smallest = FLOAT16.min_exponent - FLOAT16.precision
    regions = (
        (low, smallest, _FLUSHED),
        (smallest, FLOAT16.min_exponent, _SUBNORMAL),
        (FLOAT16.max_exponent + 1, high + 1, _OVERFLOW),
    )
    for start, end, (color, alpha) in regions:
        if start < end:
            axes.axvspan(max(start, low), min(end, high + 1), color=color, alpha=alpha, linewidth=0, zorder=0)
    axes.set_xlim(low, high + 1)


def _legend():
    from matplotlib.patches import Patch

    regions = (
        (_FLUSHED, "float16 flushes to zero"),
        (_SUBNORMAL, "subnormal in float16"),
        (_OVERFLOW, "beyond 65504: infinite"),
    )
    return [Patch(color=color, alpha=alpha, label=label) for (color, alpha), label in regions]


def _range(total, scales):
    """The binades to show: float16's own, and all that hold values at one of the scales."""
    low, high = FLOAT16.min_exponent - FLOAT16.precision - 2, FLOAT16.max_exponent + 2
    exponents = [exponent + int(np.log2(scale)) for exponent in total.histogram() for scale in scales]
    return min([low, *exponents]), max([high, *exponents])


def _shifted(distribution, scale, low, high):
    """The shares of all values that lie in each binade from `low` to `high` when they are multiplied by the scale."""
    shares = np.zeros(high - low + 1)
    for exponent, count in distribution.histogram().items():
        shares[exponent + int(np.log2(scale)) - low] = count / distribution.count
    return shares


def _shortened(name):
    """A long name without its middle, since its end tells most."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:15]}...{name[-(_LONGEST_NAME - 18) :]}"
