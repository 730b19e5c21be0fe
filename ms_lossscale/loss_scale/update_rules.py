"""The loss scales of the package, each with its update rule."""

from collections.abc import Sequence
from typing import Optional

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import check_between, check_positive_int, check_scale, describe
from ms_lossscale._output import written_scale
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.loss_scale.base import LossScale


class FixedLossScale(LossScale):
    """
    A loss scale that stays as it is.

    Args:
        loss_scale (float): The scale, a finite number > 0. Default: ``128.0`` .
        drop_overflow_update (bool): Whether a step that overflowed is skipped. With ``False`` nothing is checked, every
            step updates, and the `overflow` that a training cell reports is False. Default: ``True`` .

    Inputs and outputs are those of :class:`LossScale`.

    Raises:
        TypeError: If `loss_scale` is not a number or `drop_overflow_update` is not a bool.
        ValueError: If `loss_scale` is not finite or not > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from ms_lossscale import FixedLossScale
        >>> loss_scale = FixedLossScale(1024)
        >>> loss_scale.get_loss_scale()
        1024.0
    """

    backs_off = False

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        super().__init__(loss_scale, drop_overflow_update)

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        return loss_scale


class DynamicLossScale(LossScale):
    """
    A loss scale that backs off when gradients overflow, and grows when they have not overflowed for a while.

    The update rule, for one step::

        overflow: clean = 0; bad += 1;   if bad == hysteresis:    scale = max(scale * backoff_factor, min); bad = 0
        clean:    bad = 0;   clean += 1; if clean == scale_window: scale = min(scale * scale_factor, max);  clean = 0

    The scale is float32, always finite and > 0. With ``hysteresis=1`` this is the rule of Micikevicius et al.,
    `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, section 3.2, between a floor and a ceiling.

    Args:
        init_loss_scale (float): The scale to begin with. Default: ``2.0**16`` .
        scale_factor (float): The factor by which the scale grows, > 1. Default: ``2.0`` .
        scale_window (int): Clean steps in a row after which the scale grows, >= 1. Default: ``2000`` .
        backoff_factor (float, optional): The factor by which the scale is multiplied when it backs off, > 0 and < 1.
            Default: ``None`` , which means `1 / scale_factor`.
        hysteresis (int): Overflows in a row after which the scale backs off, >= 1. Default: ``1`` .
        min_loss_scale (float): The floor, > 0. Default: ``1.0`` .
        max_loss_scale (float): The ceiling. Default: ``2.0**24`` .

    Inputs and outputs are those of :class:`LossScale`.

    Raises:
        TypeError: If an argument is not a number, or `scale_window` or `hysteresis` is not an integer.
        ValueError: If an argument is outside the range given above, if `min_loss_scale` > `max_loss_scale`, or if
            `init_loss_scale` is not between them.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_lossscale import DynamicLossScale
        >>> loss_scale = DynamicLossScale(init_loss_scale=64, scale_window=2)
        >>> history = []
        >>> for overflow in (False, False, True, False):
        ...     _ = loss_scale.adjust(grads_finite=Tensor(not overflow))
        ...     history.append(loss_scale.get_loss_scale())
        >>> history
        [64.0, 128.0, 64.0, 64.0]
    """

    _scale_argument = "init_loss_scale"

    def __init__(
        self,
        init_loss_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        *,
        backoff_factor: Optional[float] = None,
        hysteresis: int = 1,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        super().__init__(init_loss_scale)
        owner = type(self).__name__
        self.scale_factor = check_between(owner, "scale_factor", scale_factor, 1.0, 2.0**126)
        self.scale_window = check_positive_int(owner, "scale_window", scale_window)
        if backoff_factor is None:
            backoff_factor = 1.0 / self.scale_factor
        self.backoff_factor = check_between(owner, "backoff_factor", backoff_factor, 0.0, 1.0)
        self.hysteresis = check_positive_int(owner, "hysteresis", hysteresis)
        self.min_loss_scale = check_scale(owner, "min_loss_scale", min_loss_scale)
        self.max_loss_scale = check_scale(owner, "max_loss_scale", max_loss_scale)
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(
                f"For '{owner}', the argument 'min_loss_scale' must be <= 'max_loss_scale', but got "
                f"{written_scale(self.min_loss_scale)} and {written_scale(self.max_loss_scale)}."
            )
        if not self.min_loss_scale <= init_loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"For '{owner}', the argument 'init_loss_scale' must be between 'min_loss_scale' and "
                f"'max_loss_scale', that is from {written_scale(self.min_loss_scale)} to "
                f"{written_scale(self.max_loss_scale)}, but got {written_scale(init_loss_scale)}. Choose another one "
                f"or move the bounds."
            )
        if self.scale_factor > 2**8 or (init_loss_scale < 2 and self.scale_factor > 16):
            warn_user(
                f"For '{owner}', init_loss_scale is {written_scale(init_loss_scale)}, scale_factor is "
                f"{self.scale_factor:.9g} and scale_window is {self.scale_window}, so that the scale grows by a factor "
                f"that float16 rarely has room for. Are the arguments in another order? By position they are "
                f"(init_loss_scale, scale_factor, scale_window), in MindSpore's managers, too. Pass them by name."
            )
        # Tensors, since graph mode makes Python floats float64 beside a Parameter.
        self._factor, self._backoff, self._floor, self._ceiling = (
            Tensor(value, mstype.float32)
            for value in (self.scale_factor, self.backoff_factor, self.min_loss_scale, self.max_loss_scale)
        )
        self._window, self._hysteresis = Tensor(self.scale_window, mstype.int32), Tensor(self.hysteresis, mstype.int32)
        self.clean_steps = self._counter("clean_steps")
        self.overflow_steps = self._counter("overflow_steps")

        self.fix("scale_factor", "scale_window", "backoff_factor", "hysteresis", "min_loss_scale", "max_loss_scale")

    def can_back_off(self, loss_scale: Tensor) -> Tensor:
        return prim.maximum(loss_scale * self._backoff, self._floor) < loss_scale

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        # >= rather than ==, so that a checkpoint with a larger scale_window or hysteresis does not block the rule.
        clean = prim.select(overflow, self._no_steps, self.clean_steps + self._one_step)
        grows = clean >= self._window
        if self.hysteresis == 1:
            backs_off, bad = overflow, self._no_steps
        else:
            bad = prim.select(overflow, self.overflow_steps + self._one_step, self._no_steps)
            backs_off = bad >= self._hysteresis
            bad = prim.select(backs_off, self._no_steps, bad)
        larger = prim.minimum(loss_scale * self._factor, self._ceiling)
        smaller = prim.maximum(loss_scale * self._backoff, self._floor)
        next_scale = prim.select(backs_off, smaller, prim.select(grows, larger, loss_scale))
        next_scale = ops.depend(next_scale, prim.assign(self.clean_steps, prim.select(grows, self._no_steps, clean)))
        return ops.depend(next_scale, prim.assign(self.overflow_steps, bad))


class ScheduledLossScale(LossScale):
    """
    A loss scale that is piecewise constant over the steps of the cell, skipped steps included. In a list of loss scales
    for :class:`SimultaneousTrainOneStepCell`, steps that are skipped because of another network's overflow do not
    count.

    `milestone` has the same meaning as for :func:`mindspore.nn.piecewise_constant_lr`: step :math:`i`, counted from 0,
    uses

    .. math::
        loss\\_scales[t] \\text{ for the first } t \\text{ with } i < milestone[t]

    and the last value holds afterwards. A value set by hand holds until the next milestone.

    The attributes `milestone` and `loss_scales` are lists of the two arguments.

    Args:
        milestone (Union[list[int], tuple[int]]): Increasing step numbers >= 1.
        loss_scales (Union[list[float], tuple[float]]): As many scales, each a finite number > 0.
        drop_overflow_update (bool): Whether a step that overflowed is skipped. With ``False`` nothing is checked and
            every step updates. Default: ``True`` .

    Inputs and outputs are those of :class:`LossScale`.

    Raises:
        TypeError: If `milestone` or `loss_scales` is not a list or tuple of numbers of the right type.
        ValueError: If `milestone` is empty or does not increase, if the lengths differ, or if a scale is not finite or
            not > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_lossscale import ScheduledLossScale
        >>> loss_scale = ScheduledLossScale(milestone=[2, 4], loss_scales=[2**8, 2**10])
        >>> used = []
        >>> for _ in range(5):
        ...     used.append(loss_scale.get_loss_scale())
        ...     _ = loss_scale.adjust(grads_finite=Tensor(True))
        >>> used
        [256.0, 256.0, 1024.0, 1024.0, 1024.0]
    """

    backs_off = False

    def __init__(
        self, milestone: Sequence[int], loss_scales: Sequence[float], drop_overflow_update: bool = True
    ) -> None:
        owner = type(self).__name__
        for name, value in (("milestone", milestone), ("loss_scales", loss_scales)):
            if not isinstance(value, (list, tuple)):
                raise TypeError(
                    f"For '{owner}', the argument '{name}' must be a list or tuple, but got {describe(value)}."
                )
            if not value:
                raise ValueError(f"For '{owner}', the argument '{name}' must not be empty.")
        if len(milestone) != len(loss_scales):
            raise ValueError(
                f"For '{owner}', the arguments 'milestone' and 'loss_scales' must have the same length, but got "
                f"{len(milestone)} and {len(loss_scales)}. Give one scale for each milestone; the last one stays."
            )
        milestone = [check_positive_int(owner, f"milestone[{i}]", step) for i, step in enumerate(milestone)]
        for step, next_step in zip(milestone, milestone[1:]):
            if step >= next_step:
                raise ValueError(
                    f"For '{owner}', the argument 'milestone' must increase, but got {step} before {next_step}."
                )
        loss_scales = [check_scale(owner, f"loss_scales[{i}]", scale) for i, scale in enumerate(loss_scales)]
        super().__init__(loss_scales[0], drop_overflow_update)
        self.milestone = milestone
        self.loss_scales = loss_scales
        # No new scale starts at the last milestone.
        self._starts = Tensor([0] + milestone[:-1], mstype.int32)
        self._values = Tensor(loss_scales, mstype.float32)
        self._no_scale = Tensor(0.0, mstype.float32)
        self.steps = self._counter("steps")
        self.fix("milestone", "loss_scales")

    def _largest_scales(self):
        return {"loss_scales": max(*self.loss_scales, self.get_loss_scale())}

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        step = self.steps + self._one_step
        starts = prim.equal(self._starts, step).astype(mstype.float32)
        scheduled = prim.reduce_sum(starts * self._values)
        next_scale = prim.select(scheduled > self._no_scale, scheduled, loss_scale)
        return ops.depend(next_scale, prim.assign(self.steps, step))
