"""What looks after the calls of a ManualStep in compiled code, where no Python does."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim
from ms_lossscale._values import numbered, state

# How many skipped steps in a row are told, and more than there ever are.
_TOLD_SKIPS, _NEVER = 50, 2**31 - 1
# More derivatives than are computed between two calls.
_MANY = 2.0**20


class Watch(nn.Cell):
    """
    Knows whether a call has begun and not ended, and whether all its derivatives were computed before it began. Tells,
    once, of many skipped steps in a row. Its Parameters are hidden from MindSpore, and so from checkpoints, which are
    saved between two calls. They are numbers, since graph mode would merge a bool constant with the networks' own.
    """

    def __init__(self, plan, counters):
        super().__init__(auto_prefix=False)
        # Hidden: it is a part of the transaction.
        object.__setattr__(self, "_counters", counters)
        self._none = Tensor(0.0, mstype.float32)
        self._closed = Tensor(1.0, mstype.float32)
        self._open = Tensor(-_MANY, mstype.float32)
        self._never = Tensor(_NEVER, mstype.int32)
        self._name = numbered(f"{plan.prefix}manual_step")
        self._hide("state", self._closed)
        # Above 0 if there were derivatives since the last call ended, and none of them since the present one began.
        self._hide("derivatives", self._none)
        self._hide("tells_at", Tensor(_TOLD_SKIPS, mstype.int32))
        self._print = ops.Print()
        self._told = (
            f"For '{plan.owner}'{f' {plan.prefix[:-1]!r}' if plan.prefix else ''}, the last {_TOLD_SKIPS} steps were "
            f"skipped, so that no weight changes any more. Its skip_reasons() and overflowed_parameters() say why. "
            f"Symptoms and causes: docs/diagnosis.md."
        )

    def _hide(self, name, value):
        object.__setattr__(self, name, state(f"{self._name}.{name}", value))

    def begin(self):
        """Begins a call. Returns what to wait for."""
        return prim.assign(self.state, self._open)

    def note_derivative(self):
        """Notes a derivative; one after `begin` outweighs all before it. Returns what to wait for."""
        return prim.assign_add(self.derivatives, self.state)

    def is_open(self):
        """Returns whether a call has begun and not ended, bool of shape ()."""
        return prim.less(self.state, self._none)

    def has_not_begun(self):
        """Returns whether the call that ends has not begun, or after its derivatives, bool of shape ()."""
        return prim.greater(prim.maximum(self.state, self.derivatives), self._none)

    def end(self):
        """Ends a call. Returns what to wait for."""
        return prim.assign(self.state, self._closed), prim.assign(self.derivatives, self._none)

    def count_not_begun(self):
        """Counts a call that has not begun. Returns what to wait for."""
        return self.tell(self._counters.count_not_begun())

    def tell(self, done):
        """Tells, once, if so many steps in a row were skipped, after `done`. Returns what to wait for."""
        tells = prim.greater_equal(ops.depend(self._counters.consecutive_skipped_steps, done), self.tells_at)
        if tells:
            self._print(self._told)
            tells = ops.depend(prim.logical_not(tells), prim.assign(self.tells_at, self._never))
        return tells
