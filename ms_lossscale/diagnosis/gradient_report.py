"""What is known of a network's gradients, and the loss scale that follows from it."""

import json
import math
from collections.abc import Iterable
from typing import NamedTuple, Optional, Union

from mindspore import dtype as mstype

from ms_lossscale._arguments import StrPath, check_number
from ms_lossscale._output import counted, csv_text, in_batches, percent, power, size, text_table, write_text
from ms_lossscale.diagnosis.distribution import Distribution, Shares
from ms_lossscale.diagnosis.float_format import FLOAT16, float_format

# What the package takes as a loss scale.
LOSS_SCALES = [2.0**exponent for exponent in range(-126, 127)]
# With more, the largest float32 numbers want a smaller scale than the smallest one.
_MOST_HEADROOM = 13


def check_headroom(owner, headroom):
    """Raises unless `headroom` is a whole number that every float32 gradient can keep. Returns it as an int."""
    value = check_number(owner, "headroom", headroom)
    if value not in range(_MOST_HEADROOM + 1):
        raise ValueError(
            f"For '{owner}', the argument 'headroom' must be an integer from 0 to {_MOST_HEADROOM}, but got "
            f"{headroom!r}."
        )
    return int(value)


def largest_scale(largest, headroom=2, of=FLOAT16):
    """The largest power of two by which a gradient can be multiplied so that the format leaves it the headroom."""
    limit, limit_exponent = math.frexp(of.largest)
    largest, exponent = math.frexp(largest)
    shift = limit_exponent - headroom - exponent - (largest > limit)
    return min(max(2.0**shift, LOSS_SCALES[0]), LOSS_SCALES[-1])


class Recommendation(NamedTuple):
    """
    A loss scale, and what it does to a dtype.

    - **loss_scale** (float) - The largest power of two at which the largest gradient keeps the headroom.
    - **headroom** (int) - Binades (factors of two) left below the dtype's largest number.
    - **largest** (float) - The absolute value of the largest gradient, unscaled.
    - **lost** (float) - The share of all values that the dtype still flushes to zero at that scale.
    - **saved** (float) - The share that it flushes to zero or infinity at scale 1, less `lost`.
    """

    loss_scale: float
    headroom: int
    largest: float
    lost: float
    saved: float


class GradientReport:
    """
    How the unscaled gradients of each parameter are spread over the binades, as :func:`profile_gradients` found them.

    `print(report)` is a table, with the parameters that lose most in float16 first.

    Attributes:
        parameters (dict): From each parameter's name to its :class:`Distribution`.
        batches (int): How many batches were profiled.
        loss_scale (Union[float, list[float]]): The scale at which the gradients were computed; a list, for each
            network, where they differ.
        clip (Union[float, None]): The global norm to which each batch's gradients were clipped before being counted.
        largest (Union[float, None]): The absolute value of the largest finite gradient, before clipping; None if all
            are zero.
        non_finite_losses (int): In how many batches a loss was infinite or NaN.
        step (Union[int, None]): The steps that the training cell had made, skipped ones included; None for a network.
        quantised (list[str]): The parameters whose gradients float16 held on the way, some of them as zero or as a
            subnormal number: what is counted of them was rounded or lost.
        ceiling (Union[float, None]): `loss_scale`, if a larger one was tried and gradients overflowed; None if not.
            No larger one is recommended for float16.
    """

    def __init__(
        self,
        parameters: dict[str, Distribution],
        batches: int,
        loss_scale: Union[float, list[float]],
        clip: Optional[float],
        largest: Optional[float],
        non_finite_losses: int,
        step: Optional[int],
        quantised: Iterable[str] = (),
        ceiling: Optional[float] = None,
    ) -> None:
        self.parameters = parameters
        self.batches = batches
        self.loss_scale = loss_scale
        self.clip = clip
        self.largest = largest
        self.non_finite_losses = non_finite_losses
        self.step = step
        self.quantised = list(quantised)
        self.ceiling = ceiling

    @property
    def total(self) -> Distribution:
        """The :class:`Distribution` of all parameters together."""
        total = Distribution()
        for distribution in self.parameters.values():
            total.merge(distribution)
        return total

    def shares(self, dtype: mstype.Type = mstype.float16) -> dict[float, Shares]:
        """
        What casting does to the gradients of all parameters together, at each loss scale.

        Args:
            dtype (mindspore.dtype): ``mstype.float16`` or ``mstype.bfloat16`` . Default: ``mstype.float16`` .

        Returns:
            dict, from every power of two that can be a loss scale, :math:`2^{-126}` to :math:`2^{126}`, to
            :class:`Shares`.
        """
        total = self.total
        return {loss_scale: total.shares(loss_scale, dtype) for loss_scale in LOSS_SCALES}

    @property
    def recommended_loss_scale(self) -> float:
        """
        The loss scale to use with float16: `recommend().loss_scale`.

        Raises:
            ValueError: If there is none to recommend, see :meth:`recommend`.
        """
        return self.recommend().loss_scale

    def recommend(self, headroom: int = 2, dtype: mstype.Type = mstype.float16) -> Recommendation:
        """
        Finds the largest power of two that leaves headroom for gradients larger than those that were profiled, and is
        not above the `ceiling`.

        Args:
            headroom (int): How many binades the largest gradient times the scale stays below the dtype's largest
                number, 65504 for float16. Default: ``2`` .
            dtype (mindspore.dtype): ``mstype.float16`` or ``mstype.bfloat16`` . Default: ``mstype.float16`` .

        Returns:
            Recommendation.

        Raises:
            TypeError: If `headroom` is no number.
            ValueError: If no scale can be recommended, since all gradients are zero or some are not finite; if
                `headroom` is no integer from 0 to 13, or `dtype` another one.
        """
        owner = "recommend"
        headroom = check_headroom(owner, headroom)
        of = float_format(owner, dtype)
        problem = self._why_not()
        if problem:
            raise ValueError(f"No loss scale can be recommended: {problem}")
        loss_scale = largest_scale(self.largest, headroom, of)
        if self.ceiling is not None and of is FLOAT16:
            loss_scale = min(loss_scale, 2.0 ** math.floor(math.log2(self.ceiling)))
        total = self.total
        lost = total.shares(loss_scale, dtype).flushed
        unscaled = total.shares(1.0, dtype)
        saved = unscaled.flushed + unscaled.overflowed - lost
        # There is a largest one where there is no problem.
        return Recommendation(loss_scale, headroom, self.largest, lost, saved)  # type: ignore[arg-type]

    def _title(self):
        parameters = counted(len(self.parameters), "parameter", "parameters")
        return f"Unscaled gradients of {parameters} {in_batches(self.batches)}"

    def _why_not(self):
        """Why no scale can be recommended, or an empty text."""
        if self.non_finite_losses:
            return (
                f"in {self.non_finite_losses} of {self.batches} batches the loss is not finite. The forward overflows, "
                f"which no loss scale mends; locate_overflow names the cell."
            )
        non_finite = sum(distribution.non_finite for distribution in self.parameters.values())
        if non_finite:
            return (
                f"{non_finite} gradients are not finite at loss scale {self._scale()}. Profile again at a smaller "
                f"loss_scale; if they stay, locate_overflow names the cell."
            )
        if self.largest is None:
            cure = "Profile again with a larger loss_scale, 2.0**16 say: they may have been flushed to zero on the way"
            return f"all gradients are zero. {cure}; or nothing depends on these parameters."
        return ""

    def worst_first(self, dtype: mstype.Type = mstype.float16) -> list[str]:
        """
        The names of the parameters, the ones that lose the largest share of their values at loss scale 1 first. One
        whose values are all zero has lost all of them.

        Args:
            dtype (mindspore.dtype): ``mstype.float16`` or ``mstype.bfloat16`` . Default: ``mstype.float16`` .

        Returns:
            list[str].
        """

        def loss(name):
            distribution = self.parameters[name]
            if distribution.is_all_zero:
                return 1.0, 0.0
            shares = distribution.shares(1.0, dtype)
            return distribution.non_finite / distribution.count + shares.flushed + shares.overflowed, shares.subnormal

        return sorted(self.parameters, key=loss, reverse=True)

    def __str__(self) -> str:
        problem = self._why_not()
        scales = [1.0] if problem else [1.0, self.recommended_loss_scale]
        clipped = "" if self.clip is None else f", clipped to the global norm {self.clip:g}"
        header = ["parameter", "values", "zero %", "non-finite", "min", "max"]
        for loss_scale in scales:
            header += [f"flushed % at {power(loss_scale)}", "subnormal %", "overflowed %"]
        rows = [(name, self.parameters[name]) for name in self.worst_first()]
        if len(rows) > 1:
            rows.append(("all", self.total))
        lines = [
            f"{self._title()}{clipped}, computed at loss scale {self._scale()}; what float16 does to them at loss "
            f"scale {' and '.join(map(power, scales))}",
            "",
            text_table(header, [self._row(name, distribution, scales) for name, distribution in rows]),
            "",
        ]
        if problem:
            lines.append(f"No loss scale can be recommended: {problem}")
        else:
            lines += [self._advice(), self._bfloat16()]
            if self.ceiling is not None:
                lines.append(
                    f"No loss scale above {self.ceiling:g} is recommended: inside the network gradients overflowed."
                )
        if self.quantised and not problem and min(self._scales()) < self.recommended_loss_scale:
            lines.append(self._hint())
        return "\n".join(lines)

    def _scales(self):
        return self.loss_scale if isinstance(self.loss_scale, list) else [self.loss_scale]

    def _scale(self):
        return " and ".join(f"{scale:g}" for scale in self._scales())

    def _hint(self):
        return (
            f"At this loss scale float16 rounded gradients of {len(self.quantised)} of {len(self.parameters)} "
            f"parameters on the way, to zero or to a subnormal number: they are counted as rounded. Profile again with "
            f"loss_scale={self.recommended_loss_scale:g} to see what they are."
        )

    @staticmethod
    def _row(name, distribution, scales):
        row = [
            name,
            f"{distribution.count:,}",
            percent(distribution.zeros / distribution.count if distribution.count else 0.0),
            f"{distribution.non_finite:,}",
            size(distribution.min),
            size(distribution.max),
        ]
        for loss_scale in scales:
            row += [percent(share) for share in distribution.shares(loss_scale)]
        return row

    def _advice(self):
        advice = self.recommend()
        return (
            f"Recommended loss scale for float16: {power(advice.loss_scale)}. It brings the largest gradient, "
            f"{size(advice.largest)}, to {advice.largest * advice.loss_scale:.0f}, {advice.headroom} binades or more "
            f"below 65504; saves {percent(advice.saved)} % of all values from being flushed to zero or "
            f"overflowing, and still loses {percent(advice.lost)} %."
        )

    def _bfloat16(self):
        shares = self.total.shares(1.0, mstype.bfloat16)
        return f"bfloat16 without a loss scale would flush {percent(shares.flushed)} % of all values to zero."

    def to_csv(self, path: Optional[StrPath] = None) -> str:
        """
        A row for each parameter, worst first: counts, and shares at loss scale 1 and, if there is one, at the
        recommended one.

        Args:
            path (str, optional): Where to write it, as a whole or not at all. Default: ``None`` , nowhere.

        Returns:
            str, the CSV text.
        """
        scales = [1.0] if self._why_not() else [1.0, self.recommended_loss_scale]
        header = ["parameter", "count", "zeros", "non_finite", "min", "max"]
        header += [f"{name}_at_{scale:g}" for scale in scales for name in ("flushed", "subnormal", "overflowed")]
        rows = []
        for name in self.worst_first():
            d = self.parameters[name]
            shares = [share for loss_scale in scales for share in d.shares(loss_scale)]
            rows.append([name, d.count, d.zeros, d.non_finite, d.min, d.max, *shares])
        return write_text(path, csv_text(header, rows))

    def to_json(self, path: Optional[StrPath] = None) -> str:
        """
        All that the report knows: for each parameter its counts and histogram, the shares at every loss scale for
        float16 and bfloat16, and the recommendation.

        Args:
            path (str, optional): Where to write it, as a whole or not at all. Default: ``None`` , nowhere.

        Returns:
            str, the JSON text.
        """
        problem = self._why_not()
        content = {
            "batches": self.batches,
            "loss_scale": self.loss_scale,
            "clip": self.clip,
            "step": self.step,
            "quantised": self.quantised,
            "ceiling": self.ceiling,
            "largest": self.largest,
            "non_finite_losses": self.non_finite_losses,
            "recommendation": None if problem else self.recommend()._asdict(),
            "why_no_recommendation": problem or None,
            "shares": {
                name: [{"loss_scale": scale, **shares._asdict()} for scale, shares in self.shares(dtype).items()]
                for name, dtype in (("float16", mstype.float16), ("bfloat16", mstype.bfloat16))
            },
            "parameters": {name: distribution.as_dict() for name, distribution in self.parameters.items()},
        }
        return write_text(path, json.dumps(content, indent=1))

    def plot(self, path: StrPath) -> None:
        """
        Draws the histograms, all together and by parameter, the worst first, before and after the recommended scale,
        with what float16 can't hold shaded.

        Args:
            path (str): The picture to write; its ending is its format, `.png` say.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from ms_lossscale.diagnosis.report_plot import plot_report

        rows = [(name, self.parameters[name]) for name in self.worst_first()]
        columns = {"loss scale 1": 1.0}
        if not self._why_not():
            scale = self.recommended_loss_scale
            columns[f"loss scale {power(scale)} (recommended)"] = scale
        plot_report(path, self._title(), columns, "parameter, worst first", rows, self.total)
