"""Which calls make a step: each by itself, or the calls of an accumulation cycle together."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import UseInOutermostGraph, only_if
from ms_lossscale.step.of_network import of_any_network

_SHIFT = 16
# The most calls of a cycle that fit above the count; a longer cycle is shown by the sign alone.
_MOST_STEPS = 2**15 - 1


class EveryCall(nn.Cell):
    """
    Each call is a step.

    Args:
        decision (Decision): What ends a step.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of a call, times `divisor`.
        - **divisor** (Tensor) - What they are still to be divided by: 1, or the scale.
        - **scale** (Tensor) - The loss scale of the step.
        - **others** (tuple[Tensor]) - What shows an overflow besides the gradients, bools of shape :math:`()`.
        - **known** (tuple[Tensor]) - Whether this call overflowed, if that is known already.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, whether the step overflowed, as far as is known.
    """

    def __init__(self, decision):
        super().__init__(auto_prefix=False)
        self.decision = decision

    def construct(self, grads, divisor, scale, others, known, saved):
        return self.decision(grads, divisor, scale, others, known, saved)

    def has_begun(self):
        """Whether there is something to flush."""
        return False

    def counts(self):
        """What counts the calls of a cycle: none, or one."""
        return []


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


class CycleState(nn.Cell):
    """
    What a cycle has gathered so far: the sum of its calls' gradients, in a float32 buffer for each weight, and more.

    Args:
        steps (int): Calls in a full cycle.
        weights (ParameterTuple): The weights.
        prefix (str): For the Parameters' names.
        scale_shape (tuple): The shape of the loss scale, and of what was found: :math:`()`, or :math:`(N,)`.
    """

    def __init__(self, steps, weights, prefix, scale_shape):
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

    def is_first(self):
        """Whether this call is the first of its cycle."""
        return self.count.is_first()

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


class Accumulation(nn.Cell):
    """
    The calls of a cycle are one step, at its last call.

    Args:
        state (CycleState): What the cycle has gathered.
        decision (Decision): What ends a step.
        found_in_call (FoundOverflow): Checks a call before the last by itself.
        forward_state (Cell): What the forward wrote, which a call that overflowed restores at once.
        packing (Packing): Knows the gradients of each weight.

    Inputs, outputs and methods as those of :class:`EveryCall`.
    """

    def __init__(self, state, decision, found_in_call, forward_state, packing):
        super().__init__(auto_prefix=False)
        self.state = state
        self.decision = decision
        self.found_in_call = found_in_call
        self.forward_state = forward_state
        self.packing = packing

    def construct(self, grads, divisor, scale, others, known, saved):
        known += (self.state.overflow,)
        if self.state.count.is_last():
            grads = self.packing.pack(gradients.add(self.state.gradients, self.packing.unpack(grads)))
            overflow = self.decision(grads, divisor, scale, others, known, saved)
            self.state.reset(overflow)
        else:
            overflow = self.found_in_call(grads, divisor, others, known)[0]
            self.state.add(self.packing.unpack(grads), overflow)
            overflow = only_if(of_any_network(overflow), self.forward_state.restore_step, saved)
        return overflow

    def has_begun(self):
        return self.state.count.has_begun()

    def counts(self):
        return [self.state.count]


class Flush(nn.Cell):
    """
    Ends a cycle before its last call: averages over the calls that it has really had, and updates or skips.

    Args:
        state, decision, packing: As for :class:`Accumulation`.
        scaling (Cell): Knows the cycle's scale.
        overflow_detector (OverflowDetector): Clears an NPU's register.
    """

    def __init__(self, state, decision, scaling, overflow_detector, packing):
        super().__init__(auto_prefix=False)
        self.state = state
        self.decision = decision
        self.scaling = scaling
        self.overflow_detector = overflow_detector
        self.packing = packing
        self._one = Tensor(1.0, mstype.float32)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self):
        # A register may have been raised by other work since the cycle's last call.
        grads = self.packing.pack(self.overflow_detector.start(self.use_parameters(self.state.partial_mean())))
        scale = self.scaling.of_cycle()
        overflow = self.decision(grads, self._one, scale, (), (self.state.overflow,), ())
        self.state.reset(overflow)
        return overflow
