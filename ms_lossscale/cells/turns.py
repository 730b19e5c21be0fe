"""The turns of networks that step one after the other."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, of_count
from ms_lossscale.step.state import CycleCount


class Turns(Bounded, nn.Cell):
    """Counts the cycles (calls, without accumulation), and tells which networks take part in the present one."""

    def __init__(self, networks, steps):
        super().__init__(auto_prefix=False)
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self._accumulates = steps > 1
        # Cycles that have ended, and calls of the present one.
        self.cycles = self._state(np.int32(0), "windows")
        self.calls = CycleCount(steps, "alternation.calls", "alternation.steps")
        self.every = self._state(np.ones(networks, np.int32), "every")
        # A network takes part in whole cycles, even if `every` is set within one.
        self.cycle_every = self._state(np.ones(networks, np.int32), "window_every")
        # The loss of each network's last turn that was not skipped.
        self.last_losses = self._state(np.zeros(networks, np.float32), "last_losses")
        if self._accumulates:
            # Unregistered, since checkpoints, also those of 0.1 and 0.2, do not have the losses of the last call.
            object.__setattr__(self, "losses", self._state(np.zeros(networks, np.float32), "losses"))

    @staticmethod
    def _state(value, name):
        return Parameter(Tensor(value), name=f"alternation.{name}", requires_grad=False)

    def bounds(self):
        return [of_count(self.cycles), of_count(self.every, 1), of_count(self.cycle_every, 1)]

    def begin_call(self):
        """Returns for each network whether it takes part, a tuple of bool tensors."""
        every = prim.select(self.calls.is_first(), self.every, self.cycle_every) if self._accumulates else self.every
        prim.assign(self.cycle_every, every)
        return ops.unstack(prim.equal((self.cycles + self._one) % every, self._zero))

    def end_call(self, losses, overflows):
        """
        Counts the call. At the end of a cycle, it remembers the losses of the networks whose turn was not skipped, for
        calls in which they take no part. For such calls, `losses` holds the remembered ones.
        """
        cycles = self.cycles + self._one
        if self._accumulates:
            is_last = self.calls.is_last()
            overflows = prim.logical_or(overflows, prim.logical_not(is_last))
            cycles = prim.select(is_last, cycles, self.cycles)
            prim.assign(self.losses, losses)
            self.calls.count_or_reset(is_last)
        prim.assign(self.last_losses, prim.select(overflows, self.last_losses, losses))
        prim.assign(self.cycles, cycles)

    def flush(self, overflows):
        """Ends a cycle that has begun. `overflows` tells which turns were skipped; None: the network takes no part."""
        if self.calls.has_begun():
            skipped = Tensor([overflow is not None and bool(overflow) for overflow in overflows])
            prim.assign(self.last_losses, prim.select(skipped, self.last_losses, self.losses))
            prim.assign(self.cycles, self.cycles + self._one)
            self.calls.reset(self.cycles)

    def forget_losses(self):
        """Forgets the losses of the last call after other values were loaded."""
        if self._accumulates:
            prim.assign(self.losses, self.last_losses)

    def steps_made(self):
        """Returns the number of cycles that have ended."""
        return int(self.cycles.asnumpy())

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        return [self.cycles, self.every, self.cycle_every]
