"""The report on the gradients of one or several networks, and the loss scale that follows from it."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

from mindspore import dtype as mstype

from ms_lossscale._arguments import check_number
from ms_lossscale._output import counted, in_batches, percent, size, written_scale
from ms_lossscale._values import on_not_finite, on_unreached
from ms_lossscale.diagnosis.distribution import COUNTS, FLOAT16, Distribution, Shares, float_format, sum_of
from ms_lossscale.diagnosis.report import (
    COLUMNS,
    NOTABLE_SHARE,
    Picture,
    Report,
    columns_of,
    numbers_of,
    written_scales,
)

# The loss scales that the package accepts.
LOSS_SCALES = [2.0**exponent for exponent in range(-126, 127)]
# With more, the largest float32 numbers would need a scale below the smallest one.
_MOST_HEADROOM = 13


def check_headroom(owner, headroom):
    """Raises unless `headroom` is an integer that every float32 gradient can keep. Returns it as an int."""
    value = check_number(owner, "headroom", headroom)
    if value not in range(_MOST_HEADROOM + 1):
        raise ValueError(
            f"For '{owner}', the argument 'headroom' must be an integer from 0 to {_MOST_HEADROOM}, but got "
            f"{headroom!r}."
        )
    return int(value)


def largest_scale(largest, headroom=2, of=FLOAT16):
    """Returns the largest power of two that still leaves a gradient times it the headroom in this format."""
    limit, limit_exponent = math.frexp(of.largest)
    largest, exponent = math.frexp(largest)
    shift = limit_exponent - headroom - exponent - (largest > limit)
    return min(max(2.0**shift, LOSS_SCALES[0]), LOSS_SCALES[-1])


class Recommendation(NamedTuple):
    """
    A loss scale, and what it saves and loses in a dtype.

    - **loss_scale** (float) - The largest power of two at which the largest gradient keeps the headroom.
    - **headroom** (int) - Binades (factors of two) left below the dtype's largest number.
    - **largest** (float) - The absolute value of the largest gradient, unscaled.
    - **lost** (float) - The share of all values that the dtype still flushes to zero at this scale.
    - **saved** (float) - The share that it flushes to zero or infinity at scale 1, minus `lost`.
    """

    loss_scale: float
    headroom: int
    largest: float
    lost: float
    saved: float


@dataclass(eq=False, repr=False)
class GradientReport(Report):
    """
    How the unscaled gradients of each parameter are spread over the binades, as :func:`profile_gradients` found them.

    `print(report)` prints a table for loss scale 1 and, if there is one, for the recommended loss scale. The parameters
    that lose most in float16 come first.

    Attributes:
        parameters (dict): From each parameter's name to its :class:`Distribution`.
        batches (int): How many batches were profiled.
        loss_scale (Union[float, list[float]]): The scale at which the gradients were computed; a list with one for each
            network if they differ.
        clip (Union[float, None]): The global norm to which each batch's gradients were clipped before being counted.
        largest (Union[float, None]): The absolute value of the largest finite gradient, before clipping; None if all
            are zero.
        non_finite_losses (int): In how many batches a loss was infinite or NaN.
        step (Union[int, None]): How many steps the training cell had made, skipped ones included; None for a network.
        quantised (list[str]): The parameters whose gradients float16 held on the way, some of them as zeros or
            subnormal numbers. These gradients were rounded or lost before they were counted.
        ceiling (Union[float, None]): `loss_scale`, if gradients overflowed at a larger one; otherwise None. No larger
            one is recommended for float16.
        networks (list[GradientReport]): The report of each network, if each has its own loss scale. Each recommends one
            for its network. Empty if there is one loss scale.
        not_finite_weights (dict[str, int]): How many values are infinite or NaN, by the name of the weight, for those
            weights of the network that have any.
        unreached (list[Union[int, None]]): The numbers of the optimizers all of whose gradients are exactly zero; None
            stands for the only one.
    """

    parameters: dict[str, Distribution]
    batches: int
    loss_scale: Union[float, list[float]]
    clip: Optional[float]
    largest: Optional[float]
    non_finite_losses: int
    step: Optional[int]
    quantised: list[str] = field(default_factory=list)
    ceiling: Optional[float] = None
    networks: list["GradientReport"] = field(default_factory=list)
    not_finite_weights: dict[str, int] = field(default_factory=dict)
    unreached: list[Optional[int]] = field(default_factory=list)

    @property
    def total(self) -> Distribution:
        """The :class:`Distribution` of all parameters together."""
        return sum_of(self.parameters.values())

    def shares(self, dtype: mstype.Type = mstype.float16) -> dict[float, Shares]:
        """
        What a cast to float16 or bfloat16 does to the gradients of all parameters together: a dict from every power of
        two that can be a loss scale, :math:`2^{-126}` to :math:`2^{126}`, to :class:`Shares`.
        """
        total = self.total
        return {loss_scale: total.shares(loss_scale, dtype) for loss_scale in LOSS_SCALES}

    @property
    def recommended_loss_scale(self) -> Union[float, list[float]]:
        """
        The loss scale to use with float16, `recommend().loss_scale`; a list if each network has its own. It raises as
        :meth:`recommend` does.
        """
        recommended = self.recommend()
        return [each.loss_scale for each in recommended] if isinstance(recommended, list) else recommended.loss_scale

    def recommend(
        self, headroom: int = 2, dtype: mstype.Type = mstype.float16
    ) -> Union[Recommendation, list[Recommendation]]:
        """
        Finds the largest power of two that leaves headroom for gradients larger than the profiled ones and is not above
        the `ceiling`.

        Args:
            headroom (int): How many binades the largest gradient times the scale stays below the dtype's largest
                number, 65504 for float16. Default: ``2`` .
            dtype (mindspore.dtype): ``mstype.float16`` or ``mstype.bfloat16`` . Default: ``mstype.float16`` .

        Returns:
            Recommendation; a list of them if each network has its own loss scale.

        Raises:
            TypeError: If `headroom` is no number.
            ValueError: If no scale can be recommended, because all gradients are zero or some are not finite; if
                `headroom` is not an integer from 0 to 13, or if `dtype` is neither of these.
        """
        owner = "recommend"
        headroom = check_headroom(owner, headroom)
        of = float_format(owner, dtype)
        problem = self._why_not()
        if problem:
            raise ValueError(f"No loss scale can be recommended: {problem}")
        return self._recommendation(headroom, dtype, of)

    def _recommendation(self, headroom, dtype, of):
        loss_scale = largest_scale(self.largest, headroom, of)
        if self.ceiling is not None and of is FLOAT16:
            loss_scale = min(loss_scale, 2.0 ** math.floor(math.log2(self.ceiling)))
        total = self.total
        lost = total.shares(loss_scale, dtype).flushed
        unscaled = total.shares(1.0, dtype)
        saved = unscaled.flushed + unscaled.overflowed - lost
        return Recommendation(loss_scale, headroom, self.largest, lost, saved)

    def _title(self):
        parameters = counted(len(self.parameters), "parameter", "parameters")
        return f"Unscaled gradients of {parameters} {in_batches(self.batches)}"

    def _why_not(self):
        """Returns why no scale can be recommended, or an empty text."""
        non_finite = sum(distribution.non_finite for distribution in self.parameters.values())
        if self.not_finite_weights and (self.non_finite_losses or non_finite):
            return on_not_finite(self.not_finite_weights)
        if self.non_finite_losses:
            return (
                f"in {self.non_finite_losses} of {self.batches} batches the loss is not finite. The forward overflows, "
                f"which no loss scale fixes; locate_overflow names the cell, advise_float32 those that need float32."
            )
        if non_finite:
            return (
                f"{non_finite} gradients are not finite at loss scale {self._scale()}. Profile again at a smaller "
                f"loss_scale; if they stay, locate_overflow names the cell."
            )
        if self.largest is None:
            if any(number is not None for number in self.unreached):
                return on_unreached(self.unreached)
            cure = "Profile again with a larger loss_scale, 2.0**16 say: they may have been flushed to zero on the way"
            return f"all gradients are zero. {cure}; or nothing depends on these parameters."
        return ""

    def worst_first(self, dtype: mstype.Type = mstype.float16) -> list[str]:
        """
        The names of the parameters. First come those that lose the largest share of their values in a dtype, float16 or
        bfloat16, at loss scale 1. If all values of a parameter are zero, it has lost all of them.
        """

        def loss(name):
            d = self.parameters[name]
            if d.is_all_zero:
                return 1.0, 0.0
            shares = d.shares(1.0, dtype)
            return d.non_finite / max(d.count, 1) + shares.flushed + shares.overflowed, shares.subnormal

        return sorted(self.parameters, key=loss, reverse=True)

    def _headline(self) -> str:
        clipped = "" if self.clip is None else f", clipped to the global norm {self.clip:g}"
        return (
            f"{self._title()}{clipped}, computed at loss scale {self._scale()}; what float16 does to them at loss "
            f"scale {' and '.join(map(written_scale, self._shown_scales()))}"
        )

    def _table(self) -> tuple[list[str], list[list[str]]]:
        scales, rows = self._shown_scales(), self._rows()
        header = ["parameter", *COLUMNS]
        for loss_scale in scales:
            header += [f"flushed % at {written_scale(loss_scale)}", "subnormal %", "overflowed %"]
        if len(rows) > 1:
            rows.append(("all", self.total))
        return header, [[name, *columns_of(distribution, scales)] for name, distribution in rows]

    def _remarks(self) -> list[str]:
        return [*([] if self._why_not() else self._advice()), *self._warnings()]

    def _warnings(self):
        problem = self._why_not()
        if problem:
            return [f"No loss scale can be recommended: {problem}"]
        warnings, advice = [], self.recommend()
        if self.ceiling is not None:
            warnings.append(
                f"No loss scale above {written_scale(self.ceiling)} is recommended: inside the network gradients "
                f"overflowed."
            )
        if advice.lost >= NOTABLE_SHARE:
            warnings.append(
                f"No single loss scale serves all of the network: at {written_scale(advice.loss_scale)} float16 still "
                f"flushes {percent(advice.lost)} % of all values to zero."
            )
        if warnings:
            warnings.append("advise_float32 says which cells to compute in float32.")
        if self.quantised and min(self._scales()) < advice.loss_scale:
            warnings.append(
                f"At this loss scale float16 rounded gradients of {len(self.quantised)} of {len(self.parameters)} "
                f"parameters on the way, to zero or to a subnormal number: they are counted as rounded. Profile again "
                f"with loss_scale={written_scale(advice.loss_scale)} to see what they are."
            )
        if self.not_finite_weights:
            # They need not reach the loss: on CPU, ReLU makes NaN zero.
            warnings.append(on_not_finite(self.not_finite_weights))
        if self.unreached:
            warnings.append(on_unreached(self.unreached))
        return warnings

    def _shown_scales(self):
        return [1.0] if self._why_not() else [1.0, self.recommended_loss_scale]

    def _rows(self):
        return [(name, self.parameters[name]) for name in self.worst_first()]

    def _scales(self):
        return self.loss_scale if isinstance(self.loss_scale, list) else [self.loss_scale]

    def _scale(self):
        return written_scales(self.loss_scale)

    def _advice(self):
        advice, in_bfloat16 = self.recommend(), self.total.shares(1.0, mstype.bfloat16)
        return [
            f"Recommended loss scale for float16: {written_scale(advice.loss_scale)}. It brings the largest gradient, "
            f"{size(advice.largest)}, to {advice.largest * advice.loss_scale:.0f}, {advice.headroom} binades or more "
            f"below 65504; saves {percent(advice.saved)} % of all values from being flushed to zero or "
            f"overflowing, and still loses {percent(advice.lost)} %.",
            f"bfloat16 without a loss scale would flush {percent(in_bfloat16.flushed)} % of all values to zero.",
        ]

    def _header_and_rows(self) -> tuple[list[str], list[list]]:
        scales = self._shown_scales()
        header = ["parameter", *COUNTS]
        header += [f"{name}_at_{scale:.17g}" for scale in scales for name in Shares._fields]
        return header, [[name, *numbers_of(distribution, scales)] for name, distribution in self._rows()]

    def _recommendation_as_dict(self):
        return self.recommend()._asdict()

    def _further_content(self) -> dict[str, Any]:
        problem = self._why_not()
        return {
            "recommendation": None if problem else self._recommendation_as_dict(),
            "why_no_recommendation": problem or None,
            "shares": {
                name: [{"loss_scale": scale, **shares._asdict()} for scale, shares in self.shares(dtype).items()]
                for name, dtype in (("float16", mstype.float16), ("bfloat16", mstype.bfloat16))
            },
            "parameters": {name: distribution.as_dict() for name, distribution in self.parameters.items()},
        }

    def _picture(self) -> Picture:
        scales, recommended = {"loss scale 1": 1.0}, None
        if not self._why_not():
            recommended = self._shown_scales()[1]
            scales[f"loss scale {written_scale(recommended)} (recommended)"] = recommended
        title = f"{self._title()}, computed at loss scale {self._scale()}"
        return Picture(title, scales, "parameter, worst first", self._rows(), self._warnings(), recommended)


class NetworksReport(GradientReport):
    """A :class:`GradientReport` of all `networks` together, which recommends a loss scale for each of them."""

    def _recommendation(self, headroom, dtype, of):
        return [each._recommendation(headroom, dtype, of) for each in self.networks]

    def _named(self):
        return [(f"networks[{i}]", each) for i, each in enumerate(self.networks)]

    def _why_not(self):
        return " ".join(f"{name}: {each._why_not()}" for name, each in self._named() if each._why_not())

    def _recommended_for(self):
        """Returns the names of the networks for which each loss scale is recommended."""
        names = {}
        for name, each in self._named():
            if not each._why_not():
                names.setdefault(each.recommended_loss_scale, []).append(name)
        return names

    def _shown_scales(self):
        return [1.0, *self._recommended_for()]

    def _warnings(self):
        return [f"{name}: {line}" for name, each in self._named() for line in each._warnings()]

    def __str__(self) -> str:
        head = (
            f"{self._title()}, computed at loss scale {self._scale()}; each network has its own loss scale, and a "
            f"report of its own."
        )
        return "\n\n".join([head, *(f"{name}: {each}" for name, each in self._named())])

    def _recommendation_as_dict(self):
        return [each._asdict() for each in self.recommend()]

    def _further_content(self) -> dict[str, Any]:
        return {**super()._further_content(), "networks": [each._content() for each in self.networks]}

    def _picture(self) -> Picture:
        scales = {"loss scale 1": 1.0}
        for scale, names in self._recommended_for().items():
            scales[f"loss scale {written_scale(scale)} (recommended for {' and '.join(names)})"] = scale
        title = f"{self._title()}, computed at loss scale {self._scale()}"
        return Picture(title, scales, "parameter, worst first", self._rows(), self._warnings())
