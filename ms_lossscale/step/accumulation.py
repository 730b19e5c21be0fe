"""The state of an accumulation cycle: the number of calls, the sum of their gradients, whether one overflowed."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients
from ms_lossscale._bounds import Bounded, Bounds

_SHIFT = 16
# The longest cycle whose number of calls fits above the count; a longer one is shown by the sign alone.
_MOST_STEPS = 2**15 - 1


class CycleCount(Bounded, nn.Cell):
    """
    Counts the calls of a cycle of `steps` calls. Within a cycle, the Parameter also holds `steps`, times 2**16, so that
    it is saved in checkpoints; between two cycles it is 0.

    Checkpoints of 0.1 and 0.2 hold only the count. That works as well: the next call adds `steps`.
    """

    def __init__(self, steps: int, name: str) -> None:
        super().__init__(auto_prefix=False)
        self._steps = steps
        begun = steps << _SHIFT if steps <= _MOST_STEPS else -(2**31)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._begun, self._full = Tensor(begun, mstype.int32), Tensor(begun + steps, mstype.int32)
        self.value = Parameter(Tensor(0, mstype.int32), name=name, requires_grad=False)

    def bounds(self) -> list[Bounds]:
        must_be = (
            f"the number of calls so far in a cycle of {self._steps}, at most {self._steps - 1} (plus 2**16 times the "
            f"length of its cycle)"
        )
        return [Bounds(self.value, must_be, lambda value: is_possible(int(value), self._steps))]

    def is_first(self):
        """Returns whether this call is the first of its cycle."""
        return ops.equal(self.value, self._zero)

    def is_last(self):
        """Returns whether this call is the last of its cycle."""
        return self._next() >= self._full

    def calls(self):
        """Returns the number of calls so far in a cycle that has begun."""
        return ops.bitwise_or(self.value, self._begun) - self._begun

    def count(self):
        """Counts a call that is not the last of its cycle."""
        ops.assign(self.value, self._next())

    def count_or_reset(self, is_last):
        """Counts a call, or ends the cycle if it is the last."""
        ops.assign(self.value, ops.select(is_last, self._zero, self._next()))

    def reset(self, after):
        """Ends the cycle, once `after` has been computed."""
        ops.assign(self.value, ops.depend(self._zero, after))

    def has_begun(self):
        """Returns whether a cycle has begun, as a Python bool."""
        return bool(self.value.asnumpy() != 0)

    def is_plain(self):
        """Returns whether a cycle has begun and only its count was loaded, as a Python bool."""
        return 0 < int(self.value.asnumpy()) < 1 << _SHIFT

    def _next(self):
        return ops.bitwise_or(self.value, self._begun) + self._one


def is_possible(value, steps):
    """Returns whether a loaded number can be the count of a cycle: of as many calls as it shows, or else of `steps`."""
    if value < 0:
        # Nobody has cycles of 2**30 calls, so that a small negative number is none of theirs.
        return 0 < value + 2**31 < (steps if steps > _MOST_STEPS else 2**30)
    its_steps, calls = divmod(value, 1 << _SHIFT)
    if its_steps == 0:
        # Cells without cycles refuse every count but 0 with a message of their own.
        return calls < steps or steps == 1
    return 0 < calls < its_steps


def other_steps(value, steps):
    """
    Returns how many calls the cycle takes, a str, according to a loaded number. Returns None if no cycle has begun, or
    if the number shows none other than `steps`.
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
        self.count = CycleCount(steps, f"{prefix}accumulation.micro_steps")
        self.overflow = Parameter(
            Tensor(np.zeros(scale_shape, bool)), name=f"{prefix}accumulation.overflow", requires_grad=False
        )

    def sum_with(self, grads):
        """Returns the sum of the cycle's gradients and those of its last call."""
        return gradients.add(self.gradients, grads)

    def add(self, grads, overflow):
        """Adds the gradients of a call that is not the last of its cycle."""
        gradients.assign_add(self.gradients, grads)
        ops.assign(self.overflow, overflow)
        self.count.count()

    def partial_mean(self):
        """Returns the mean over the calls so far: each was divided by the length of a whole cycle when it was added."""
        rest = self._steps / self.count.calls().astype(mstype.float32)
        return gradients.multiply(self.gradients, rest)

    def reset(self, after):
        """Empties the cycle once `after` is computed. A multiplication by 0 would keep a NaN."""
        gradients.assign_zeros(self.gradients, after)
        self.count.reset(after)
        ops.assign(self.overflow, ops.logical_and(self.overflow, gradients.never(ops.depend(self._zero, after))))
