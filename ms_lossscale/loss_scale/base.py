"""The base class of the loss scales: a cell with the scale, and the state of its update rule, as Parameters."""

from typing import Optional, TypeVar

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import check_bool, check_scale
from ms_lossscale._bounds import Bounded, Bounds, of_count, of_scale
from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale._mindspore import Float32Cell, write_in_place
from ms_lossscale._output import written_scale

Tensors = TypeVar("Tensors", Tensor, tuple[Tensor, ...])


class LossScale(FixedAttributes, Bounded, Float32Cell):
    """
    Base class of the loss scales. A subclass defines the update rule, :meth:`next_scale`.

    A loss scale is used in three ways:

    - as `loss_scale` of this package's training cells;
    - as `scale_sense` of :class:`mindspore.nn.TrainOneStepWithLossScaleCell`, which uses :meth:`get_loss_scale` and
      calls it;
    - in a hand-written loop, in place of a :class:`mindspore.amp.LossScaler`, with :meth:`scale`, :meth:`unscale` and
      :meth:`adjust`.

    Args:
        loss_scale (float): The scale to begin with, a finite number > 0.
        drop_overflow_update (bool): Whether gradients are checked and a step that overflowed is skipped.

    Inputs:
        - **loss_scale** (Parameter) - The scale that the caller holds, float32 of shape :math:`()` or :math:`(1,)`.
          The update rule's next value is assigned to it.
        - **overflow** (Tensor) - Whether this step overflowed, bool of shape :math:`()`.

    Outputs:
        Tensor, the input `overflow`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """

    def __init__(self, loss_scale: float, drop_overflow_update: bool = True) -> None:
        super().__init__()
        loss_scale = check_scale(type(self).__name__, self._scale_argument, loss_scale)
        self.drop_overflow_update = check_bool(type(self).__name__, "drop_overflow_update", drop_overflow_update)
        self.scale_value = Parameter(
            Tensor(loss_scale, mstype.float32), name="loss_scale.scale_value", requires_grad=False
        )
        # Made here: graph mode merges equal constants, and a network's in-place operators then change all of them.
        self._one = Tensor(1.0, mstype.float32)
        self._no_steps, self._one_step = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._smallest, self._largest = Tensor(2.0**-126, mstype.float32), Tensor(2.0**126, mstype.float32)
        # The names of its counters, to which a Cell that holds it gives another prefix.
        self._counters: tuple[str, ...] = ()
        self._limit = self._beyond_limit = ""
        self._flags_of_setting: list[Parameter] = []
        # Only the user's update rules can leave that range.
        self._rule_is_checked = type(self).next_scale.__module__.partition(".")[0] != "ms_lossscale"
        self._not_a_scale = (
            f"For '{type(self).__name__}', 'next_scale' must return the next step's scale, a float32 Tensor of the "
            f"shape of 'loss_scale', but it returned something else."
        )

    _scale_argument = "loss_scale"
    # Whether the update rule ever lowers the scale after an overflow.
    backs_off = True
    # Whether it does so, too, if the loss was not finite, or what the forward wrote, which no lower scale mends.
    backoff_if_loss_not_finite = True
    # The floor and the ceiling, if the update rule moves the scale between two.
    min_loss_scale: Optional[float] = None
    max_loss_scale: Optional[float] = None

    def _instead_of_assigning(self, name):
        return "Construct a new loss scale and a new cell, or set the scale itself with set_loss_scale(value)."

    def _counter(self, name):
        self._counters += (name,)
        return Parameter(Tensor(0, mstype.int32), name=f"loss_scale.{name}", requires_grad=False)

    def bounds(self) -> list[Bounds]:
        counters = [its for its in self.get_parameters() if its.name.rpartition(".")[2] in self._counters]
        return [self.bounds_of(self.scale_value), *map(of_count, counters)]

    def bounds_of(self, scale: Parameter) -> Bounds:
        """Returns the bounds of a Parameter that holds this loss scale."""
        smallest, largest = (float(its.asnumpy()) for its in (self._smallest, self._largest))
        return of_scale(scale, smallest, largest)

    def get_loss_scale(self) -> float:
        """Reads the scale that the next step will use."""
        return float(self.scale_value.asnumpy().reshape(()))

    def set_loss_scale(self, value: float) -> None:
        """
        Sets the scale by hand. The update rule continues from there.

        Args:
            value (float): The new scale, a finite number > 0.

        Raises:
            TypeError: If `value` is not a number.
            ValueError: If `value` is not finite or not > 0, or if it is too large for gradient accumulation.
        """
        value = self.check_scale(f"{type(self).__name__}.set_loss_scale", "value", value)
        # Not set_data: in PyNative mode, compiled code would go on writing to the memory that it replaces.
        flags = [(flag, Tensor(True)) for flag in self._flags_of_setting]
        write_in_place([(self.scale_value, Tensor(value, mstype.float32)), *flags])

    def mark_when_set(self, flag: Parameter) -> None:
        """Makes `flag`, a bool Parameter, True whenever the scale is set by hand."""
        self._flags_of_setting.append(flag)

    def check_scale(self, owner: str, name: str, value: float) -> float:
        """Raises unless `value` can be this loss scale. Returns it as a float."""
        value = check_scale(owner, name, value)
        largest = float(self._largest.asnumpy())
        if value > largest:
            raise ValueError(
                f"For '{owner}', the argument '{name}' must be at most {written_scale(largest)} {self._limit}, but got "
                f"{value!r}. {self._beyond_limit}"
            )
        return value

    def limit_to(self, largest: float, when: str, beyond: str) -> None:
        """
        Narrows the range of scales. Raises a ValueError if the scale is larger, or if its update rule can make it so,
        which tells `when` there is such a limit, and what is `beyond` it.
        """
        self._limit, self._beyond_limit = when, beyond
        self._largest = Tensor(min(float(self._largest.asnumpy()), largest), mstype.float32)
        for name, value in self._largest_scales().items():
            self.check_scale(type(self).__name__, name, value)

    def _largest_scales(self):
        """Returns the scale and the largest one that the update rule can reach, by the arguments that set them."""
        largest = {self._scale_argument: self.get_loss_scale()}
        if self.max_loss_scale is not None:
            largest["max_loss_scale"] = self.max_loss_scale
        return largest

    def scale(self, inputs: Tensors) -> Tensors:
        """
        Multiplies a loss, or each tensor of a tuple, by the scale, in float32.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): Of any shape and float type. The result has the same shapes.
        """
        return gradients.multiply(inputs, self.scale_value)

    def unscale(self, inputs: Tensors) -> Tensors:
        """
        Divides a tensor, or each tensor of a tuple, by the scale, in float32: `input * (1 / scale)`.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): Of any shape and float type. The result has the same shapes;
                RowTensors keep their indices.
        """
        return gradients.multiply(inputs, self._one / self.scale_value)

    def adjust(self, grads_finite: Tensor) -> bool:
        """
        Updates the scale by its update rule, after one step.

        Args:
            grads_finite (Tensor): Whether all gradients were finite, bool of shape :math:`()`.

        Returns:
            bool, True.
        """
        prim.assign(self.scale_value, self.advance(self.scale_value, prim.logical_not(grads_finite)))
        return True

    def construct(self, loss_scale, overflow):
        next_scale = self.advance(loss_scale.astype(mstype.float32), overflow)
        overflow = ops.depend(overflow, prim.assign(loss_scale, next_scale))
        return ops.depend(overflow, prim.assign(self.scale_value, next_scale.reshape(())))

    def advance(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """
        Takes one step of the update rule, with the arguments of :meth:`next_scale`. The result can always be a loss
        scale, whatever a rule of your own returns. Raises a TypeError or a ValueError if the rule returns no Tensor, or
        one of another size.
        """
        next_scale = self.next_scale(loss_scale, overflow)
        if self._rule_is_checked:
            next_scale = self._or_else(next_scale, loss_scale)
        return next_scale

    def can_back_off(self, loss_scale: Tensor) -> Tensor:
        """
        Whether the update rule would lower this step's scale after this overflow or after some more, a bool Tensor of
        the scale's shape. It is always True for an update rule of your own that does not override it.
        """
        return prim.equal(loss_scale, loss_scale)

    def _or_else(self, next_scale, loss_scale):
        """Returns `next_scale` in float32, or `loss_scale` if that is not a valid loss scale."""
        if not isinstance(next_scale, Tensor):
            raise TypeError(self._not_a_scale)
        if next_scale.shape != loss_scale.shape:
            if next_scale.size != loss_scale.size:
                raise ValueError(self._not_a_scale)
            next_scale = next_scale.reshape(loss_scale.shape)
        next_scale = next_scale.astype(mstype.float32)
        # Both comparisons are False for NaN.
        is_scale = prim.logical_and(next_scale >= self._smallest, next_scale <= self._largest)
        return prim.select(is_scale, next_scale, loss_scale)

    def next_scale(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """
        The update rule. It advances its own counters, and does not write `loss_scale`.

        Args:
            loss_scale (Tensor): This step's scale, float32.
            overflow (Tensor): Whether this step overflowed, bool of shape :math:`()`.

        Returns:
            Tensor, the next step's scale, float32, of the shape of `loss_scale`. If the value can't be a loss scale
            (NaN, inf, <= 0, or outside 2**-126 to 2**126), the scale stays as it is. When the gradients of N calls are
            accumulated, the upper bound is about N times lower.
        """
        raise NotImplementedError
