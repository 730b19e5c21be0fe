"""The state of an accumulation cycle: the number of calls, the sum of their gradients, whether one overflowed."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, Bounds, of_count


class CycleCount(Bounded, nn.Cell):
    """
    Counts the calls of a cycle of `steps` calls. A second Parameter, with the name `length`, says how many the cycle
    that has begun takes, so that no other cell goes on with it. Both are 0 between two cycles.
    """

    def __init__(self, steps: int, name: str, length: str) -> None:
        super().__init__(auto_prefix=False)
        self.steps = steps
        self._zero, self._one, self._steps = (Tensor(number, mstype.int32) for number in (0, 1, steps))
        self.value = Parameter(Tensor(0, mstype.int32), name=name, requires_grad=False)
        self.length = Parameter(Tensor(0, mstype.int32), name=length, requires_grad=False)

    def bounds(self) -> list[Bounds]:
        must_be = f"the number of calls so far in a cycle of {self.steps}, at most {self.steps - 1}"
        return [
            Bounds(self.value, must_be, lambda value, length: value == 0 or 0 < value < length, self.length),
            of_count(self.length),
        ]

    def is_first(self):
        """Returns whether this call is the first of its cycle."""
        return prim.equal(self.value, self._zero)

    def is_last(self):
        """Returns whether this call is the last of its cycle."""
        return self.value + self._one >= self._steps

    def count(self):
        """Counts a call that is not the last of its cycle."""
        prim.assign(self.value, self.value + self._one)
        prim.assign(self.length, self._steps)

    def count_or_reset(self, is_last):
        """Counts a call, or ends the cycle if it is the last."""
        prim.assign(self.value, prim.select(is_last, self._zero, self.value + self._one))
        prim.assign(self.length, prim.select(is_last, self._zero, self._steps))

    def reset(self, after):
        """Ends the cycle, once `after` has been computed."""
        zero = ops.depend(self._zero, after)
        prim.assign(self.value, zero)
        prim.assign(self.length, zero)

    def has_begun(self):
        """Returns whether a cycle has begun, as a Python bool."""
        return bool(self.value.asnumpy() > 0)


class CycleState(nn.Cell):
    """
    Holds what a cycle of `steps` calls has added up: the sum of the gradients, in a float32 buffer for each weight, and
    whether a call overflowed, in the shape of the loss scale, :math:`()` or :math:`(N,)`.
    """

    def __init__(self, steps: int, weights: ParameterTuple, prefix: str, scale_shape: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = ParameterTuple(
            Parameter(
                initializer("zeros", weight.shape, mstype.float32),
                name=f"{prefix}accumulation.{weight.name}",
                requires_grad=False,
            )
            for weight in weights
        )
        self._steps = Tensor(steps, mstype.float32)
        self._zero = Tensor(0.0, mstype.float32)
        self.count = CycleCount(steps, f"{prefix}accumulation.micro_steps", f"{prefix}accumulation.steps")
        self.overflow = Parameter(
            Tensor(np.zeros(scale_shape, bool)), name=f"{prefix}accumulation.overflow", requires_grad=False
        )

    def sum_with(self, grads):
        """Returns the sum of the cycle's gradients and those of its last call."""
        return gradients.add(self.gradients, grads)

    def add(self, grads, overflow):
        """Adds the gradients of a call that is not the last of its cycle."""
        gradients.assign_add(self.gradients, grads)
        prim.assign(self.overflow, overflow)
        self.count.count()

    def partial_mean(self):
        """Returns the mean over the calls so far: each was divided by the length of a whole cycle when it was added."""
        rest = self._steps / self.count.value.astype(mstype.float32)
        return gradients.multiply(self.gradients, rest)

    def reset(self, after):
        """Empties the cycle once `after` is computed. A multiplication by 0 would keep a NaN."""
        gradients.assign_zeros(self.gradients, after)
        self.count.reset(after)
        prim.assign(self.overflow, prim.logical_and(self.overflow, gradients.never(ops.depend(self._zero, after))))
