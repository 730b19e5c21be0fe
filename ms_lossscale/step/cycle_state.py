"""The state of an accumulation cycle: the number of calls, the sum of their gradients, whether one overflowed."""

from collections.abc import Sequence
from typing import Optional

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._bounds import Bounded, Bounds, of_count
from ms_lossscale.step.optimizers import network_prefix


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
    Holds what a cycle of `steps` calls has added up: the sum of the gradients, in a float32 buffer for each weight;
    whether a call overflowed, in the shape of the loss scale, :math:`()` or :math:`(N,)`; if it `keeps_losses`, the sum
    of the losses; and for each network that of the calls' weights, which is 0 where they have none.

    `weights` has the Parameters of each network. Cycles are weighted if `weighted` is True, not if it is False, and if
    it is None, each one shows.
    """

    def __init__(
        self,
        steps: int,
        weights: Sequence[ParameterTuple],
        prefix: str,
        scale_shape: tuple[int, ...],
        keeps_losses: bool,
        weighted: Optional[bool],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = ParameterTuple(
            Parameter(
                initializer("zeros", weight.shape, mstype.float32),
                name=f"{prefix}accumulation.{weight.name}",
                requires_grad=False,
            )
            for its_weights in weights
            for weight in its_weights
        )
        self._steps = Tensor(steps, mstype.float32)
        self._zero = Tensor(0.0, mstype.float32)
        self.count = CycleCount(steps, f"{prefix}accumulation.micro_steps", f"{prefix}accumulation.steps")
        self.overflow = Parameter(
            Tensor(np.zeros(scale_shape, bool)), name=f"{prefix}accumulation.overflow", requires_grad=False
        )

        self.loss = None
        if keeps_losses:
            self.loss = Parameter(Tensor(0.0), name=f"{prefix}accumulation.sum_of_losses", requires_grad=False)
        prefixes = [network_prefix(i) for i in range(len(weights))] if len(weights) > 1 else [prefix]
        self.weights = ParameterTuple(
            Parameter(Tensor(0.0), name=f"{its}accumulation.sum_of_weights", requires_grad=False) for its in prefixes
        )
        self.is_weighted = Parameter(Tensor(False), name=f"{prefix}accumulation.is_weighted", requires_grad=False)
        self._yes = Tensor(True)
        self.must_be_weighted = weighted
        sums = [self.loss] if keeps_losses else []
        self.sums = ParameterTuple(sums if weighted is False else [*sums, *self.weights, self.is_weighted])

    def sum_with(self, grads):
        """Returns the sum of the cycle's gradients and those of its last call."""
        return gradients.add(self.gradients, grads)

    def weights_with(self, weights):
        """Returns the sum of the cycle's weights and those of its last call, nothing if the calls have none."""
        return gradients.add(self.weights, weights) if len(weights) > 0 else ()

    def losses_with(self, losses):
        """Returns the mean of the cycle's losses and those of its last call, in place of these, if it is kept."""
        return losses if self.loss is None else ((self.loss + gradients.sum_of_all(losses)) / self._steps,)

    def add(self, grads, overflow, losses, weights):
        """Adds the gradients of a call that is not the last of its cycle."""
        gradients.assign_add(self.gradients, grads)
        prim.assign(self.overflow, overflow)
        if self.loss is not None:
            prim.assign_add(self.loss, gradients.sum_of_all(losses))
        if len(weights) > 0:
            gradients.assign_add(self.weights, weights)
            prim.assign(self.is_weighted, self._yes)
        self.count.count()

    def partial_share(self):
        """Returns what makes the sum so far a mean: each call was divided by the length of a whole cycle."""
        return self._steps / self._calls()

    def partial_losses(self):
        """Returns the mean of the losses so far, if it is kept."""
        return () if self.loss is None else (self.loss / self._calls(),)

    def _calls(self):
        return self.count.value.astype(mstype.float32)

    def reset(self, after):
        """Empties the cycle once `after` is computed. A multiplication by 0 would keep a NaN."""
        gradients.assign_zeros(self.gradients, after)
        self.count.reset(after)
        if self.sums:
            gradients.assign_zeros(self.sums, after)
        prim.assign(self.overflow, prim.logical_and(self.overflow, gradients.never(ops.depend(self._zero, after))))
