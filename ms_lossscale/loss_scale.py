"""Loss scales: cells that own the scale, and the law by which it moves, as Parameters."""

import math
from collections.abc import Sequence
from typing import Any, Optional, TypeVar

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._arguments import (
    check_between,
    check_bool,
    check_positive_int,
    check_scale,
    describe,
)
from ms_lossscale._mindspore import Float32Cell, write_in_place

Tensors = TypeVar("Tensors", Tensor, tuple[Tensor, ...])


class LossScale(Float32Cell):
    """
    Base class of the loss scales. A subclass gives the law: `next_scale`.

    A loss scale is used in three ways:

    - as `loss_scale` of this package's training cells;
    - as `scale_sense` of :class:`mindspore.nn.TrainOneStepWithLossScaleCell`, through :meth:`get_loss_scale` and the
      call itself;
    - in a hand-written loop, in the place of a :class:`mindspore.amp.LossScaler`, through :meth:`scale`,
      :meth:`unscale` and :meth:`adjust`.

    Args:
        loss_scale (float): The scale to begin with, a finite number > 0.
        drop_overflow_update (bool): Whether gradients are checked and a step that overflowed is skipped.

    Inputs:
        - **loss_scale** (Parameter) - The scale that the caller holds, float32 of shape :math:`()` or :math:`(1,)`.
          The law's next value is assigned to it.
        - **overflow** (Tensor) - Whether this step overflowed, bool of shape :math:`()`.

    Outputs:
        Tensor, the input `overflow`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """

    def __init__(self, loss_scale: float, drop_overflow_update: bool = True) -> None:
        super().__init__()
        loss_scale = check_scale(type(self).__name__, self._scale_argument, loss_scale)
        check_bool(type(self).__name__, "drop_overflow_update", drop_overflow_update)
        self._fixed: frozenset[str] = frozenset()
        self.drop_overflow_update = drop_overflow_update
        self.scale_value = Parameter(
            Tensor(loss_scale, mstype.float32), name="loss_scale.scale_value", requires_grad=False
        )
        # Made here, since graph mode merges equal constants, and a network's in-place operators then change all.
        self._one = Tensor(1.0, mstype.float32)
        self._no_steps, self._one_step = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._smallest, self._largest = Tensor(2.0**-126, mstype.float32), Tensor(2.0**126, mstype.float32)
        # Of the accumulation windows that use this loss scale, the Parameters that hold a window's scale.
        self._window_scales: list[Parameter] = []
        # The laws of this package can't leave that range.
        self._law_is_checked = type(self).next_scale.__module__.partition(".")[0] != "ms_lossscale"
        self._not_a_scale = (
            f"For '{type(self).__name__}', 'next_scale' must return the next step's scale, a float32 Tensor of the "
            f"shape of 'loss_scale', but it returned something else."
        )

    _scale_argument = "loss_scale"
    # Whether the law ever lowers the scale after an overflow.
    backs_off = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_fixed", ()):
            raise AttributeError(
                f"For '{type(self).__name__}', '{name}' is fixed, since what is compiled would not hear of a change. "
                f"Construct a new loss scale and a new cell, or set the scale itself with set_loss_scale(value)."
            )
        super().__setattr__(name, value)

    def fix(self, *names: str) -> None:
        """Makes attributes read-only."""
        self._fixed = self._fixed.union(names)

    def _counter(self, name):
        return Parameter(Tensor(0, mstype.int32), name=f"loss_scale.{name}", requires_grad=False)

    def get_loss_scale(self) -> float:
        """
        Reads the scale.

        Returns:
            float, the scale that the next step will use.
        """
        return float(self.scale_value.asnumpy().reshape(()))

    def set_loss_scale(self, value: float) -> None:
        """
        Sets the scale by hand; the law goes on from there.

        Args:
            value (float): The new scale, a finite number > 0.

        Raises:
            TypeError: If `value` is not a number.
            ValueError: If `value` is not finite or not > 0, or too large for gradients that are accumulated.
        """
        value = self.check_scale(f"{type(self).__name__}.set_loss_scale", "value", value)
        # Not set_data: in PyNative mode a compiled function would go on writing to the memory that it replaces.
        write_in_place([(self.scale_value, Tensor(value, mstype.float32))])
        for window_scale in self._window_scales:
            ops.assign(window_scale, -ops.abs(window_scale))

    def mark_when_set(self, window_scale: Parameter) -> None:
        """Has the sign of `window_scale`, a Parameter, made negative when the scale is set by hand."""
        self._window_scales.append(window_scale)

    def check_scale(self, owner: str, name: str, value: float) -> float:
        """Raises unless `value` can be this loss scale. Returns it as a float."""
        value = check_scale(owner, name, value)
        largest = float(self._largest.asnumpy())
        if value > largest:
            raise ValueError(
                f"For '{owner}', the argument '{name}' must be at most 2**{math.log2(largest):.0f} where the gradients "
                f"of several calls are accumulated, so that the share of a call divided by the scale is no subnormal "
                f"number, which would make every gradient zero, but got {value!r}. Choose a smaller one."
            )
        return value

    def limit(self, steps: int) -> None:
        """
        Narrows the range to what gradients allow that are multiplied by `1 / steps / scale`.

        Args:
            steps (int): Over how many calls gradients are averaged.

        Raises:
            ValueError: If the scale is larger, or can become so by its law.
        """
        largest = min(float(self._largest.asnumpy()), 2.0 ** (126 - (steps - 1).bit_length()))
        self._largest = Tensor(largest, mstype.float32)
        for name, value in self._largest_scales().items():
            self.check_scale(type(self).__name__, name, value)

    def _largest_scales(self):
        """The scale, and the largest one that the law can arrive at, by the arguments that tell."""
        return {self._scale_argument: self.get_loss_scale()}

    def scale(self, inputs: Tensors) -> Tensors:
        """
        Multiplies a loss, or each tensor of a tuple, by the scale, in float32.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): Of any shape and float type.

        Returns:
            Union[Tensor, tuple[Tensor]], float32, of the same shapes.
        """
        return gradients.multiply(inputs, self.scale_value)

    def unscale(self, inputs: Tensors) -> Tensors:
        """
        Divides a tensor, or each tensor of a tuple, by the scale, in float32: `input * (1 / scale)`.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): Of any shape and float type; RowTensors keep their indices.

        Returns:
            Union[Tensor, tuple[Tensor]], float32, of the same shapes.
        """
        return gradients.multiply(inputs, self._one / self.scale_value)

    def adjust(self, grads_finite: Tensor) -> bool:
        """
        Moves the scale by its law, after one step.

        Args:
            grads_finite (Tensor): Whether all gradients were finite, bool of shape :math:`()`.

        Returns:
            bool, True.
        """
        ops.assign(self.scale_value, self.advance(self.scale_value, ops.logical_not(grads_finite)))
        return True

    def construct(self, loss_scale, overflow):
        next_scale = self.advance(loss_scale.astype(mstype.float32), overflow)
        overflow = ops.depend(overflow, ops.assign(loss_scale, next_scale))
        return ops.depend(overflow, ops.assign(self.scale_value, next_scale.reshape(())))

    def advance(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """
        Takes one step of the law. Args and returns as those of :meth:`next_scale`; what is returned can be a loss
        scale, whatever a user's own law says.

        Raises:
            TypeError: If the law returns no Tensor.
            ValueError: If the law returns a Tensor of another size.
        """
        next_scale = self.next_scale(loss_scale, overflow)
        if self._law_is_checked:
            next_scale = self._or_else(next_scale, loss_scale)
        return next_scale

    def can_back_off(self, loss_scale: Tensor) -> Tensor:
        """
        Whether the law, by this overflow or by some more, would lower the scale.

        Args:
            loss_scale (Tensor): This step's scale, float32.

        Returns:
            Tensor, bool, of the shape of `loss_scale`. Of a user's own law it is always True.
        """
        return ops.equal(loss_scale, loss_scale)

    def _or_else(self, next_scale, loss_scale):
        """`next_scale`, in float32, or `loss_scale` if that can be no loss scale."""
        if not isinstance(next_scale, Tensor):
            raise TypeError(self._not_a_scale)
        if next_scale.shape != loss_scale.shape:
            if next_scale.size != loss_scale.size:
                raise ValueError(self._not_a_scale)
            next_scale = next_scale.reshape(loss_scale.shape)
        next_scale = next_scale.astype(mstype.float32)
        # Neither holds of a NaN.
        is_scale = ops.logical_and(next_scale >= self._smallest, next_scale <= self._largest)
        return ops.select(is_scale, next_scale, loss_scale)

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """
        The law. Advances the counters it needs, and does not touch `loss_scale`.

        Args:
            loss_scale (Tensor): This step's scale, float32.
            overflow (Tensor): Whether this step overflowed, bool of shape :math:`()`.

        Returns:
            Tensor, the next step's scale, float32, of the shape of `loss_scale`. A value that can be no loss scale,
            that is NaN, inf, <= 0, or outside 2**-126 to 2**126, is not taken: the scale stays as it is. Where
            the gradients of N calls are accumulated, the upper bound is about N times lower.
        """
        raise NotImplementedError


class FixedLossScale(LossScale):
    """
    A loss scale that stays as it is.

    Args:
        loss_scale (float): The scale, a finite number > 0. Default: ``128.0`` .
        drop_overflow_update (bool): Whether a step that overflowed is skipped. With ``False`` nothing is checked, every
            step updates, and the `overflow` that a training cell reports is False. Default: ``True`` .

    Inputs:
        - **loss_scale** (Parameter) - The scale that the caller holds, float32 of shape :math:`()` or :math:`(1,)`.
        - **overflow** (Tensor) - Whether this step overflowed, bool of shape :math:`()`.

    Outputs:
        Tensor, the input `overflow`.

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
    A loss scale that backs off when gradients overflow and grows when they have not done so for a while.

    The law, for one step::

        overflow: clean = 0; bad += 1;   if bad == hysteresis:    scale = max(scale * backoff_factor, min); bad = 0
        clean:    bad = 0;   clean += 1; if clean == scale_window: scale = min(scale * scale_factor, max);  clean = 0

    The scale is float32, always finite and > 0. With ``hysteresis=1`` this is the law of Micikevicius et al.,
    `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, section 3.2, between a floor and a ceiling.

    Args:
        init_loss_scale (float): The scale to begin with. Default: ``2.0**16`` .
        scale_factor (float): What the scale grows by, > 1. Default: ``2.0`` .
        scale_window (int): Clean steps in a row after which the scale grows, >= 1. Default: ``2000`` .
        backoff_factor (float, optional): What the scale is multiplied by when it backs off, > 0 and < 1.
            Default: ``None`` , that is `1 / scale_factor`.
        hysteresis (int): Overflows in a row after which the scale backs off, >= 1. Default: ``1`` .
        min_loss_scale (float): The floor, > 0. Default: ``1.0`` .
        max_loss_scale (float): The ceiling. Default: ``2.0**24`` .

    Inputs:
        - **loss_scale** (Parameter) - The scale that the caller holds, float32 of shape :math:`()` or :math:`(1,)`.
          The law's next value is assigned to it.
        - **overflow** (Tensor) - Whether this step overflowed, bool of shape :math:`()`.

    Outputs:
        Tensor, the input `overflow`.

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
                f"{self.min_loss_scale} and {self.max_loss_scale}."
            )
        if not self.min_loss_scale <= init_loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"For '{owner}', the argument 'init_loss_scale' must be between 'min_loss_scale' and "
                f"'max_loss_scale', that is from {self.min_loss_scale} to {self.max_loss_scale}, but got "
                f"{init_loss_scale}. Choose another one or move the bounds."
            )
        # Tensors, since graph mode takes Python floats beside a Parameter for float64.
        self._factor, self._backoff, self._floor, self._ceiling = (
            Tensor(value, mstype.float32)
            for value in (self.scale_factor, self.backoff_factor, self.min_loss_scale, self.max_loss_scale)
        )
        self._window, self._hysteresis = Tensor(self.scale_window, mstype.int32), Tensor(self.hysteresis, mstype.int32)
        self.clean_steps = self._counter("clean_steps")
        self.overflow_steps = self._counter("overflow_steps")

        self.fix("scale_factor", "scale_window", "backoff_factor", "hysteresis", "min_loss_scale", "max_loss_scale")

    def _largest_scales(self):
        return {**super()._largest_scales(), "max_loss_scale": self.max_loss_scale}

    def can_back_off(self, loss_scale: Tensor) -> Tensor:
        return ops.maximum(loss_scale * self._backoff, self._floor) < loss_scale

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        # Compared with >= and not ==, so that a checkpoint of a longer window or hysteresis does not block the law.
        clean = ops.select(overflow, self._no_steps, self.clean_steps + self._one_step)
        grows = clean >= self._window
        if self.hysteresis == 1:
            backs_off, bad = overflow, self._no_steps
        else:
            bad = ops.select(overflow, self.overflow_steps + self._one_step, self._no_steps)
            backs_off = bad >= self._hysteresis
            bad = ops.select(backs_off, self._no_steps, bad)
        larger = ops.minimum(loss_scale * self._factor, self._ceiling)
        smaller = ops.maximum(loss_scale * self._backoff, self._floor)
        next_scale = ops.select(backs_off, smaller, ops.select(grows, larger, loss_scale))
        next_scale = ops.depend(next_scale, ops.assign(self.clean_steps, ops.select(grows, self._no_steps, clean)))
        return ops.depend(next_scale, ops.assign(self.overflow_steps, bad))


class ScheduledLossScale(LossScale):
    """
    A loss scale that is piecewise constant over the steps of the cell, skipped steps included; in a list of loss scales
    of :class:`SimultaneousTrainOneStepCell`, but for those that another network's overflow skipped.

    `milestone` means what it means for :func:`mindspore.nn.piecewise_constant_lr`: step :math:`i`, counted from 0, uses

    .. math::
        loss\\_scales[t] \\text{ for the first } t \\text{ with } i < milestone[t]

    and the last value holds afterwards. A value set by hand holds until the next milestone.

    The attributes `milestone` and `loss_scales` are lists of the two arguments.

    Args:
        milestone (Union[list[int], tuple[int]]): Increasing step numbers >= 1.
        loss_scales (Union[list[float], tuple[float]]): As many scales, each a finite number > 0.
        drop_overflow_update (bool): Whether a step that overflowed is skipped. With ``False`` nothing is checked and
            every step updates. Default: ``True`` .

    Inputs:
        - **loss_scale** (Parameter) - The scale that the caller holds, float32 of shape :math:`()` or :math:`(1,)`.
          The next step's value is assigned to it.
        - **overflow** (Tensor) - Whether this step overflowed, bool of shape :math:`()`.

    Outputs:
        Tensor, the input `overflow`.

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
                f"{len(milestone)} and {len(loss_scales)}. Give one scale for each milestone; the last one holds on."
            )
        milestone = [check_positive_int(owner, f"milestone[{i}]", step) for i, step in enumerate(milestone)]
        for earlier, later in zip(milestone, milestone[1:]):
            if earlier >= later:
                raise ValueError(
                    f"For '{owner}', the argument 'milestone' must increase, but got {earlier} before {later}."
                )
        loss_scales = [check_scale(owner, f"loss_scales[{i}]", scale) for i, scale in enumerate(loss_scales)]
        super().__init__(loss_scales[0], drop_overflow_update)
        self.milestone = milestone
        self.loss_scales = loss_scales
        # The last milestone ends nothing: its scale holds on.
        self._starts = Tensor([0] + milestone[:-1], mstype.int32)
        self._values = Tensor(loss_scales, mstype.float32)
        self._no_scale = Tensor(0.0, mstype.float32)
        self.steps = self._counter("steps")
        self.fix("milestone", "loss_scales")

    def _largest_scales(self):
        return {"loss_scales": max(*self.loss_scales, self.get_loss_scale())}

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        step = self.steps + self._one_step
        starts = ops.equal(self._starts, step).astype(mstype.float32)
        scheduled = ops.ReduceSum()(starts * self._values)
        next_scale = ops.select(scheduled > self._no_scale, scheduled, loss_scale)
        return ops.depend(next_scale, ops.assign(self.steps, step))
