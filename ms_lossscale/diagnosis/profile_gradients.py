"""Profiles gradients, and recommends a loss scale."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Optional, Union

import mindspore
import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._arguments import Batches, check_number, check_scale
from ms_lossscale._output import counted, in_batches, percent, size, written_scale
from ms_lossscale._values import are_finite, on_not_finite, on_unreached
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.arguments import ParametersOrBatches, each_batch, not_finite_weights_of, trained_parts
from ms_lossscale.diagnosis.distribution import FLOAT16, SMALLEST_NORMAL, Distribution, Shares, float_format, sum_of
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.report import NOTABLE_SHARE, Report, one_or_each
from ms_lossscale.function_network import Network

# The loss scales that the package accepts.
LOSS_SCALES = [2.0**exponent for exponent in range(-126, 127)]
# With more, the largest float32 numbers would need a scale below the smallest one.
_MOST_HEADROOM = 13
# How much smaller the next scale to try is where gradients overflow, how much larger where all of them are zero, and
# how large it gets then.
_DOWN, _UP, _HIGHEST = 2.0**4, 2.0**16, 2.0**64

# Below it bfloat16, with its 8 bits, holds numbers that float16 does not.
_FINER_IN_BFLOAT16 = np.float32(2.0**-17)


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
        not_finite_weights (dict[str, int]): How many values are infinite or NaN, by the name of the weight, for those
            weights of the network that have any.
        unreached (list[Union[int, None]]): The numbers of the optimizers all of whose gradients are exactly zero; None
            stands for the only one.
    """

    _first_columns = ("parameter",)

    parameters: dict[str, Distribution]
    batches: int
    loss_scale: Union[float, list[float]]
    clip: Optional[float]
    largest: Optional[float]
    non_finite_losses: int
    step: Optional[int]
    quantised: list[str] = field(default_factory=list)
    ceiling: Optional[float] = None
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
    def recommended_loss_scale(self) -> float:
        """The loss scale to use with float16, `recommend().loss_scale`. It raises as :meth:`recommend` does."""
        return self.recommend().loss_scale

    def recommend(self, headroom: int = 2, dtype: mstype.Type = mstype.float16) -> Recommendation:
        """
        Finds the largest power of two that leaves headroom for gradients larger than the profiled ones and is not above
        the `ceiling`.

        Args:
            headroom (int): How many binades the largest gradient times the scale stays below the dtype's largest
                number, 65504 for float16. Default: ``2`` .
            dtype (mindspore.dtype): ``mstype.float16`` or ``mstype.bfloat16`` . Default: ``mstype.float16`` .

        Returns:
            Recommendation.

        Raises:
            TypeError: If `headroom` is no number.
            ValueError: If no scale can be recommended, because all gradients are zero or some are not finite; if
                `headroom` is not an integer from 0 to 13, or if `dtype` is neither of these.
        """
        value, of = check_number("recommend", "headroom", headroom), float_format("recommend", dtype)
        if value not in range(_MOST_HEADROOM + 1):
            what = f"the argument 'headroom' must be an integer from 0 to {_MOST_HEADROOM}"
            raise ValueError(f"For 'recommend', {what}, but got {headroom!r}.")
        problem = self._why_not()
        if problem or self.largest is None:
            raise ValueError(f"No loss scale can be recommended: {problem}")
        loss_scale = largest_scale(self.largest, int(value), of)
        if self.ceiling is not None and of is FLOAT16:
            loss_scale = min(loss_scale, 2.0 ** math.floor(math.log2(self.ceiling)))
        lost, unscaled = self.total.shares(loss_scale, dtype).flushed, self.total.shares(1.0, dtype)
        saved = unscaled.flushed + unscaled.overflowed - lost
        return Recommendation(loss_scale, int(value), self.largest, lost, saved)

    def _why_not(self):
        """Returns why no scale can be recommended, or an empty text."""
        non_finite = self.total.non_finite
        if self.not_finite_weights and (self.non_finite_losses or non_finite):
            return on_not_finite(self.not_finite_weights)
        if self.non_finite_losses:
            return (
                f"in {self.non_finite_losses} of {self.batches} batches the loss is not finite. The forward overflows, "
                f"which no loss scale fixes; locate_overflow names the cell, advise_float32 those that need float32."
            )
        if non_finite:
            at = f"{non_finite} gradients are not finite at loss scale {self._scale()}"
            return f"{at}. Profile again at a smaller loss_scale; if they stay, locate_overflow names the cell."
        if self.largest is None and any(number is not None for number in self.unreached):
            return on_unreached(self.unreached)
        if self.largest is None:
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
            return d.share_of_non_finite + shares.flushed + shares.overflowed, shares.subnormal

        return sorted(self.parameters, key=loss, reverse=True)

    def _title(self):
        of = f"Unscaled gradients of {counted(len(self.parameters), 'parameter', 'parameters')}"
        clipped = "" if self.clip is None else f", clipped to the global norm {self.clip:g}"
        return f"{of} {in_batches(self.batches)}{clipped}, computed at loss scale {self._scale()}"

    @property
    def _total_rows(self):
        return [(("all",), self.total)] if len(self.parameters) > 1 else []

    def _rows(self):
        return [((name,), self.parameters[name]) for name in self.worst_first()]

    def _shown_scales(self):
        if self._why_not():
            return {1.0: "loss scale 1"}
        recommended = self.recommended_loss_scale
        return {1.0: "loss scale 1", recommended: f"loss scale {written_scale(recommended)} (recommended)"}

    def _remarks(self):
        if self._why_not():
            return self._warnings()
        advice, in_bfloat16 = self.recommend(), self.total.shares(1.0, mstype.bfloat16)
        saved, lost = percent(advice.saved), percent(advice.lost)
        return [
            f"Recommended loss scale for float16: {written_scale(advice.loss_scale)}. It brings the largest gradient, "
            f"{size(advice.largest)}, to {advice.largest * advice.loss_scale:.0f}, {advice.headroom} binades or more "
            f"below 65504; saves {saved} % of all values from being flushed to zero or overflowing, and still loses "
            f"{lost} %.",
            f"bfloat16 without a loss scale would flush {percent(in_bfloat16.flushed)} % of all values to zero.",
            *self._warnings(),
        ]

    def _warnings(self):
        if self._why_not():
            return [f"No loss scale can be recommended: {self._why_not()}"]
        warnings, advice = [], self.recommend()
        scale = written_scale(advice.loss_scale)
        if self.ceiling is not None:
            above = written_scale(self.ceiling)
            warnings.append(f"No loss scale above {above} is recommended: inside the network gradients overflowed.")
        if advice.lost >= NOTABLE_SHARE:
            lost = f"float16 still flushes {percent(advice.lost)} % of all values to zero"
            warnings.append(f"No single loss scale serves all of the network: at {scale} {lost}.")
        if warnings:
            warnings.append("advise_float32 says which cells to compute in float32.")
        if self.quantised and np.min(self.loss_scale) < advice.loss_scale:
            warnings.append(
                f"At this loss scale float16 rounded gradients of {len(self.quantised)} of {len(self.parameters)} "
                f"parameters on the way, to zero or to a subnormal number: they are counted as rounded. Profile again "
                f"with loss_scale={scale} to see what they are."
            )
        # Weights that are not finite need not reach the loss: on CPU, ReLU makes NaN zero.
        return list(filter(None, [*warnings, on_not_finite(self.not_finite_weights), on_unreached(self.unreached)]))

    def _content_as_dicts(self):
        return {
            "recommendation": None if self._why_not() else self.recommend()._asdict(),
            "why_no_recommendation": self._why_not() or None,
            "parameters": {name: distribution.as_dict() for name, distribution in self.parameters.items()},
        }


class GradientReports(list[GradientReport]):
    """A list of the :class:`GradientReport` of each network, where each has its own loss scale."""

    @property
    def recommended_loss_scale(self) -> list[float]:
        """The loss scales to use, as `set_loss_scale` of the training cell takes them."""
        return [each.recommended_loss_scale for each in self]

    def __str__(self) -> str:
        return "\n\n".join(f"networks[{i}]: {each}" for i, each in enumerate(self))


def profile_gradients(
    network: Network,
    parameters: ParametersOrBatches = None,
    batches: Optional[Batches] = None,
    *,
    loss_scale: Optional[float] = None,
    clip: Optional[float] = None,
) -> Union[GradientReport, GradientReports]:
    """
    Counts, over some batches, how the gradients of each parameter are spread over float16's range.

    It runs forward and backward in the present mode, in which float16 rounds as in training, and updates nothing. The
    network is the same afterwards, including BatchNorm's statistics. Only dropout goes on with other random numbers if
    training runs in PyNative mode. For each parameter it keeps counts by binade, so the memory does not grow with the
    batches.

    If a network takes a gradient in its forward (a gradient penalty), PyNative mode loses second derivatives, as in
    training, and a warning says so. Graph mode keeps them.

    A training cell of this package knows its networks and weights: ``profile_gradients(cell, batches)`` .

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell; or a function, such as the one that you differentiate around a :class:`ManualStep`. A function may
            return a tuple, whose first item is then the loss. If it scales the loss with :meth:`ManualStep.scale`, the
            loss stays as it is here.
        parameters (list[Parameter], optional): The parameters to differentiate with respect to. Leave it out for a
            training cell. Default: ``None`` , all trainable ones.
        batches (iterable): A tuple of the network's inputs for each batch; or a dataset. They are gone through for each
            network, and again for a second pass. Those of an iterator are then kept in memory.
        loss_scale (float, optional): The scale by which the loss is multiplied. The gradients are divided by it in
            float32 before they are counted. If it is too small, a float16 network underflows on the way. Default:
            ``None`` . A training cell then uses its present scale, or those of its networks. A plain network uses 1; if
            float16 underflows there, a second pass uses the scale that the first one recommends. If gradients overflow
            at a scale, it is replaced by one 16 times smaller, down to 1, or to the cell's `min_loss_scale` if that is
            smaller.
        clip (float, optional): The global norm to which the unscaled gradients of one optimizer are clipped before they
            are counted, as with `clip_norm` of the training cells. The recommended scale is that for the gradients
            before clipping, because these are what the backward computes. Default: ``None`` .

    Returns:
        GradientReport. If each network of a training cell has its own loss scale, a list with a report of each, which
        also has `recommended_loss_scale` , a list.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no batches, `parameters` is empty or not the network's, or a number is out of range.
        RuntimeError: If the network fails on a batch, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_lossscale import profile_gradients
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> batch = np.full((4, 2), 1e-5, np.float32), np.zeros((4, 1), np.float32)
        >>> report = profile_gradients(network, net.trainable_params(), [batch])
        >>> report.parameters["weight"].shares()
        Shares(flushed=1.0, subnormal=0.0, overflowed=0.0)
        >>> report.recommended_loss_scale
        35184372088832.0
    """
    owner = "profile_gradients"
    if batches is None and isinstance(network, TrainingCell):
        parameters, batches = None, parameters
    parts = trained_parts(owner, network, parameters)
    if loss_scale is not None:
        loss_scale = check_scale(owner, "loss_scale", loss_scale)
    if isinstance(batches, Iterator) and (loss_scale is None or len(parts) > 1):
        batches = list(batches)
    if clip is not None and not check_number(owner, "clip", clip) > 0:
        raise ValueError(f"For '{owner}', the argument 'clip' must be a number > 0, but got {clip!r}.")

    def run(loss_and_grads, scale, smallest):
        """Runs the batches, unless gradients overflow and the scale may still become smaller."""
        profile = _Profile(loss_and_grads, scale, smallest, clip)
        for batch in each_batch(owner, batches):
            if profile.is_given_up:
                break
            with running(owner, f"batches[{profile.batches}]"):
                profile.add(batch)
        loss_and_grads.restore()
        return profile

    with replay(owner, parts, mindspore.get_context("mode")) as replayed:
        profiles = [_last_profile(each.part, loss_scale, partial(run, each)) for each in replayed]
    step = network.steps_made() if isinstance(network, TrainingCell) else None
    if isinstance(network, TrainingCell) and isinstance(network.loss_scale, list):
        return GradientReports(_report([profile], clip, step) for profile in profiles)
    return _report(profiles, clip, step)


def _report(profiles, clip, step):
    """Returns one report of all these profiles."""
    return GradientReport(
        parameters={name: each for profile in profiles for name, each in profile.distributions.items()},
        batches=profiles[0].batches,
        loss_scale=one_or_each([profile.loss_scale for profile in profiles]),
        clip=clip,
        largest=max((profile.largest for profile in profiles if profile.largest is not None), default=None),
        non_finite_losses=len(set().union(*(profile.non_finite_losses for profile in profiles))),
        step=step,
        quantised=[name for profile in profiles for name in profile.quantised()],
        ceiling=min((profile.ceiling for profile in profiles if profile.ceiling is not None), default=None),
        not_finite_weights=not_finite_weights_of([profile.part for profile in profiles]),
        unreached=[profile.part.optimizer for profile in profiles if profile.is_zero()],
    )


def _last_profile(part, loss_scale, run):
    """Runs a part at one scale after the other, as `profile_gradients` says. Returns what is to be reported."""
    if loss_scale is not None:
        return run(loss_scale, loss_scale)
    profile = _without_overflow(run, part.loss_scale or 1.0, part.floor)
    if part.loss_scale is not None:
        return profile
    while profile.quantised():
        is_known = profile.largest is not None
        larger = largest_scale(profile.largest) if is_known else profile.loss_scale * _UP
        if larger <= profile.loss_scale or (larger > _HIGHEST and not is_known):
            break
        finer = _without_overflow(run, larger, profile.loss_scale * _DOWN)
        if finer.overflowed:
            profile.ceiling = profile.loss_scale
            break
        profile = finer
        if is_known:
            break
    return profile


def _without_overflow(run, scale, smallest):
    profile = run(scale, smallest)
    while profile.is_given_up:
        profile = run(max(profile.loss_scale / _DOWN, smallest), smallest)
    if profile.loss_scale < scale:
        profile.ceiling = profile.loss_scale
    return profile


class _Profile:
    """The gradients of one part in one pass over the batches."""

    def __init__(self, loss_and_grads, loss_scale, smallest_scale, clip):
        self._loss_and_grads, self.part = loss_and_grads, loss_and_grads.part
        self.loss_scale, self._smallest_scale, self._clip = loss_scale, smallest_scale, clip
        self.distributions = {weight.name: Distribution() for weight in self.part.weights}
        # The names of weights whose gradients float16 does not hold, or only as zeros or with fewer bits than a normal
        # number, and of those with values that bfloat16 does not hold.
        self._unfit, self._lost, self._finer = set(), set(), set()
        self.largest, self.batches = None, 0
        # The numbers of batches whose loss is not finite, and whether another batch had gradients that are not.
        self.non_finite_losses, self.overflowed = set(), False
        # The loss scale, if larger ones overflowed.
        self.ceiling = None

    def add(self, batch):
        loss, grads = self._loss_and_grads.of(self.loss_scale, batch)
        grads = [grad.astype(mstype.float32).asnumpy() for grad in grads]
        if not are_finite([loss]):
            self.non_finite_losses.add(self.batches)
        elif not all(np.isfinite(grad).all() for grad in grads):
            self.overflowed = True
        self.batches += 1
        for name, grad in zip(self.distributions, grads):
            self._look_for_float16(name, grad)
        grads = [grad * np.float32(1.0 / self.loss_scale) for grad in grads]
        largest = [float(np.max(np.abs(grad), initial=0.0, where=np.isfinite(grad))) for grad in grads]
        self.largest = max([self.largest or 0.0, *largest]) or None
        for distribution, grad in zip(self.distributions.values(), self._clipped(grads)):
            distribution.add(grad)

    def _clipped(self, grads):
        if self._clip is None:
            return grads
        norm = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))
        # Values that are not finite stay so, since they must be counted as such.
        return [grad * np.float32(self._clip / norm) for grad in grads] if self._clip < norm < np.inf else grads

    def is_zero(self):
        """Returns whether all gradients are exactly zero."""
        return all(each.is_all_zero for each in self.distributions.values())

    @property
    def is_given_up(self):
        """Whether there will be another pass at a smaller scale."""
        return self.overflowed and self.loss_scale > self._smallest_scale

    def _look_for_float16(self, name, grad):
        """Examines what the backward returned for a weight, in float32."""
        finite = np.abs(grad[np.isfinite(grad)])
        sizes = finite[finite > 0]
        with np.errstate(over="ignore", under="ignore"):
            fits = (sizes.astype(np.float16) == sizes).all()
        is_lost = sizes.size < finite.size or (sizes < SMALLEST_NORMAL).any()
        is_finer_than_bfloat16 = ((sizes.view(np.uint32) & 0xFFFF > 0) | (sizes < _FINER_IN_BFLOAT16)).any()
        for names, holds in zip((self._unfit, self._lost, self._finer), (not fits, is_lost, is_finer_than_bfloat16)):
            names.update([name] if holds else [])

    def quantised(self):
        """Returns the names of the weights whose gradients lost something in float16 on the way."""
        network, fitting = self.part.network, self.distributions.keys() - self._unfit
        # Values that float16 holds and bfloat16 does not almost certainly come from it: float32's would have more bits.
        is_float16 = (
            bool(fitting & self._finer)
            or any(weight.dtype == mstype.float16 for weight in network.get_parameters())
            or any(cell.get_flags().get("fp16", False) for _, cell in network.cells_and_names())
        )
        return [name for name in self.distributions if is_float16 and name in fitting & self._lost]
