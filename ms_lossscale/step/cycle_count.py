"""How many calls a cycle has had, and how many it takes."""

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

_SHIFT = 16
# The most calls of a cycle that fit above the count; a longer cycle is shown by the sign alone.
_MOST_STEPS = 2**15 - 1


class CycleCount(nn.Cell):
    """
    Counts the calls of a cycle. As long as one has begun, the number that is kept also holds how many calls it
    takes, times 2**16, so that a checkpoint has it; between two cycles it is 0.

    Checkpoints of 0.1 and 0.2 have the plain count. It is as good, and the next call mends it.

    Args:
        steps (int): Calls in a full cycle.
        name (str): The Parameter's name.
    """

    def __init__(self, steps, name):
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
    How many calls the cycle takes, as a kept number shows it.

    Args:
        value (int): The number.
        steps (int): How many it should be.

    Returns:
        str, or None if no cycle has begun, or if nothing says that it takes others than `steps`.
    """
    if value == 0:
        return None
    if value < 0:
        return None if steps > _MOST_STEPS else f"more than {_MOST_STEPS}"
    its_steps = value >> _SHIFT
    if its_steps == 0:
        return "more than 1" if steps == 1 else None
    return None if its_steps == steps else str(its_steps)
