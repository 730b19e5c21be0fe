"""What an accumulation cycle has gathered: how many calls, the sum of their gradients, whether one overflowed."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients

_SHIFT = 16
# The most calls of a cycle that fit above the count; a longer cycle is shown by the sign alone.
_MOST_STEPS = 2**15 - 1


class CycleCount(nn.Cell):
    """
    Counts the calls of a cycle of `steps`. As long as one has begun, the number that is kept also holds `steps`, times
    2**16, so that a checkpoint has it; between two cycles it is 0.

    Checkpoints of 0.1 and 0.2 have the plain count. It is as good, and the next call mends it.
    """

    def __init__(self, steps: int, name: str) -> None:
        super().__init__(auto_prefix=False)
        begun = steps << _SHIFT if steps <= _MOST_STEPS else -(2**31)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._begun, self._full = Tensor(begun, mstype.int32), Tensor(begun + steps, mstype.int32)
        self.value = Parameter(Tensor(0, mstype.int32), name=name, requires_grad=False)

    def is_first(self):
        """Whether this call is the first of its cycle."""
        return ops.equal(self.value, self._zero)

    def is_last(self):
        """Whether this call is the last of its cycle."""
        return self._next() >= self._full

    def calls(self):
        """The calls of a cycle that has begun."""
        return ops.bitwise_or(self.value, self._begun) - self._begun

    def count(self):
        """Counts a call that is not its cycle's last."""
        ops.assign(self.value, self._next())

    def count_or_reset(self, is_last):
        """Counts a call that may be."""
        ops.assign(self.value, ops.select(is_last, self._zero, self._next()))

    def reset(self, after):
        """Ends the cycle, once `after` has been computed."""
        ops.assign(self.value, ops.depend(self._zero, after))

    def has_begun(self):
        """Whether a cycle has begun, for the host."""
        return bool(self.value.asnumpy() != 0)

    def is_plain(self):
        """Whether a cycle has begun of which only the count was loaded, for the host."""
        return 0 < int(self.value.asnumpy()) < 1 << _SHIFT

    def _next(self):
        return ops.bitwise_or(self.value, self._begun) + self._one


def other_steps(value, steps):
    """
    How many calls the cycle takes, a str, as a kept number shows it; None if no cycle has begun, or if nothing says
    that it takes others than `steps`.
    """
    if value == 0:
        return None
    if value < 0:
        return None if steps > _MOST_STEPS else f"more than {_MOST_STEPS}"
    its_steps = value >> _SHIFT
    if its_steps == 0:
        return "more than 1" if steps == 1 else None
    return None if its_steps == steps else str(its_steps)


class CycleState(nn.Cell):
    """
    What a cycle of `steps` calls has gathered so far: the sum of their gradients, in a float32 buffer for each weight,
    and whether one overflowed, of the shape of the loss scale: :math:`()`, or :math:`(N,)`.
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
        self.count = CycleCount(steps, f"{prefix}accumulation.micro_steps")
        self.overflow = Parameter(
            Tensor(np.zeros(scale_shape, bool)), name=f"{prefix}accumulation.overflow", requires_grad=False
        )

    def add(self, grads, overflow):
        """Adds the gradients of a call that is not its cycle's last."""
        gradients.assign_add(self.gradients, grads)
        ops.assign(self.overflow, overflow)
        self.count.count()

    def partial_mean(self):
        """The mean over the calls that the cycle has really had. What was added had been divided by all of them."""
        rest = self._steps / self.count.calls().astype(mstype.float32)
        return gradients.multiply(self.gradients, rest)

    def reset(self, after):
        """Empties the cycle, once `after` has been computed. Not by a multiplication with 0, which keeps a NaN."""
        gradients.assign_zeros(self.gradients, after)
        self.count.reset(after)
        ops.assign(self.overflow, ops.logical_and(self.overflow, gradients.never(ops.depend(self._zero, after))))
