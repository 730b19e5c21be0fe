"""The base class of all reports: a table, files and a picture."""

import json
from typing import Any, Optional

from ms_lossscale._arguments import StrPath
from ms_lossscale._output import csv_text, percent, size, write_text, written_scale
from ms_lossscale.diagnosis.distribution import COUNTS
from ms_lossscale.diagnosis.picture import Picture, draw

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


class Report:
    """Base class of the reports. A subclass says what is in the files."""

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
        draw(path, self._picture())

    def _content(self):
        further = self._further_content()
        fields = {name: value for name, value in vars(self).items() if name not in further}
        return {**fields, **further}

    def _header_and_rows(self) -> tuple[list[str], list[list]]:
        raise NotImplementedError

    def _further_content(self) -> dict[str, Any]:
        raise NotImplementedError

    def _picture(self) -> Picture:
        raise NotImplementedError
