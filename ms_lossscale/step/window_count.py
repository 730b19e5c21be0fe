"""How many calls a window has had, and how many it takes."""

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

_SHIFT = 16
# The most calls of a window that fit above the count; a window of more is told by the sign alone.
_MOST_STEPS = 2**15 - 1


class WindowCount(nn.Cell):
    """
    Counts the calls of a window. As long as one has begun, the number that is kept tells besides how many calls it
    takes, times 2**16, so that a checkpoint tells it; between two windows it is 0.

    Checkpoints of 0.1 and 0.2 have the plain count. It is as good, and the next call mends it.

    Args:
        steps (int): Calls in a full window.
        name (str): The Parameter's name.
    """

    def __init__(self, steps, name):
        super().__init__(auto_prefix=False)
        begun = steps << _SHIFT if steps <= _MOST_STEPS else -(2**31)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._begun, self._full = Tensor(begun, mstype.int32), Tensor(begun + steps, mstype.int32)
        self.value = Parameter(Tensor(0, mstype.int32), name=name, requires_grad=False)

    def is_first(self):
        """Whether this call is the first of its window."""
        return ops.equal(self.value, self._zero)

    def is_last(self):
        """Whether this call is the last of its window."""
        return self._next() >= self._full

    def calls(self):
        """The calls of a window that has begun."""
        return ops.bitwise_or(self.value, self._begun) - self._begun

    def count(self):
        """Counts a call that is not its window's last."""
        ops.assign(self.value, self._next())

    def count_or_reset(self, is_last):
        """Counts a call that may be."""
        ops.assign(self.value, ops.select(is_last, self._zero, self._next()))

    def reset(self, after):
        """Ends the window, once `after` has been computed."""
        ops.assign(self.value, ops.depend(self._zero, after))

    def has_begun(self):
        """Whether a window has begun, for the host."""
        return bool(self.value.asnumpy() != 0)

    def is_plain(self):
        """Whether a window has begun of which only the count was loaded, for the host."""
        return 0 < int(self.value.asnumpy()) < 1 << _SHIFT

    def _next(self):
        return ops.bitwise_or(self.value, self._begun) + self._one


def other_steps(value, steps):
    """
    How many calls the window takes that a kept number tells of.

    Args:
        value (int): The number.
        steps (int): How many it should be.

    Returns:
        str, or None if no window has begun, or if nothing says that it takes others than `steps`.
    """
    if value == 0:
        return None
    if value < 0:
        return None if steps > _MOST_STEPS else f"more than {_MOST_STEPS}"
    its_steps = value >> _SHIFT
    if its_steps == 0:
        return "more than 1" if steps == 1 else None
    return None if its_steps == steps else str(its_steps)
