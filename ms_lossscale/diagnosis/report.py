"""What all reports have in common: a table, files and a picture."""

import json
from typing import Any, Optional

from ms_lossscale._arguments import StrPath
from ms_lossscale._output import csv_text, percent, size, write_text
from ms_lossscale.diagnosis.picture import Picture, draw

# A smaller share of values out of range is not worth a look.
NOTABLE_SHARE = 0.01

# The columns of a table that show a Distribution, and then, at each loss scale, what float16 does to it.
COLUMNS = ["values", "zero %", "non-finite", "min", "max"]


def columns_of(distribution, scales=(1.0,)):
    """What stands in the columns: those of the counts, and for each loss scale flushed, subnormal, overflowed."""
    d = distribution
    counts = [f"{d.count:,}", percent(d.share_of_zeros), f"{d.non_finite:,}", size(d.min), size(d.max)]
    return counts + [percent(share) for scale in scales for share in d.shares(scale)]


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
        Draws the histograms, all together and by row of the table, in its order, with zeros and what is not finite
        beside them, what float16 can't hold shaded, and the printed warnings below.

        Args:
            path (str): The picture to write; its ending is its format, `.png` say.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        draw(path, self._picture())

    def _header_and_rows(self) -> tuple[list[str], list[list]]:
        raise NotImplementedError

    def _content(self) -> dict[str, Any]:
        raise NotImplementedError

    def _picture(self) -> Picture:
        raise NotImplementedError
