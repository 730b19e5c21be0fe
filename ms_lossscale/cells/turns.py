"""Whose turn it is when networks step one after the other."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype


class Turns(nn.Cell):
    """
    Counts the windows (without accumulation: the calls) and says which network takes part in the present one.

    Args:
        networks (int): How many there are.
        steps (int): Calls in a full window.
    """

    def __init__(self, networks, steps):
        super().__init__(auto_prefix=False)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._steps = Tensor(steps, mstype.int32)
        # Windows that have ended, and calls of the present one.
        self.windows = self._state(np.int32(0), "windows")
        self.calls = self._state(np.int32(0), "calls")
        self.every = self._state(np.ones(networks, np.int32), "every")
        # A network takes part in whole windows, also if `every` is set within one.
        self.window_every = self._state(np.ones(networks, np.int32), "window_every")
        self.last_losses = self._state(np.zeros(networks, np.float32), "last_losses")

    @staticmethod
    def _state(value, name):
        return Parameter(Tensor(value), name=f"alternation.{name}", requires_grad=False)

    def begin_call(self):
        """For each network whether it takes part, a tuple of bool tensors."""
        is_first = ops.equal(self.calls, self._zero)
        ops.assign(self.window_every, ops.select(is_first, self.every, self.window_every))
        return ops.unstack(ops.equal((self.windows + self._one) % self.window_every, self._zero))

    def end_call(self, losses):
        """Counts the call, and remembers its losses for the calls in which a network does not take part."""
        ops.assign(self.last_losses, losses)
        calls = self.calls + self._one
        is_last = calls >= self._steps
        ops.assign(self.windows, ops.select(is_last, self.windows + self._one, self.windows))
        ops.assign(self.calls, ops.select(is_last, self._zero, calls))

    def flush(self):
        """Ends a window that has begun."""
        if self.calls.asnumpy() > 0:
            ops.assign(self.windows, self.windows + self._one)
            ops.assign(self.calls, self._zero)

    def steps_made(self):
        """The windows that have ended."""
        return int(self.windows.asnumpy())

    def shared_state(self):
        """The small Parameters that have the same values on all ranks."""
        return [self.windows, self.calls, self.every, self.window_every]
