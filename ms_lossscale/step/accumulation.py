"""Gradient accumulation: what a window of micro-steps has gathered so far."""

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ms_lossscale import _gradients as gradients


class Accumulation(nn.Cell):
    """
    The sum of a window's unscaled gradients, one float32 buffer for each weight, and what else a window remembers.

    Args:
        steps (int): Calls in a full window. The gradients that are added have been divided by it already.
        weights (ParameterTuple): The weights, whose gradients are summed.
        prefix (str): For the Parameters' names.
    """

    def __init__(self, steps, weights, prefix):
        super().__init__(auto_prefix=False)
        self.steps = steps
        self.gradients = ParameterTuple(
            Parameter(
                initializer("zeros", weight.shape, mstype.float32),
                name=f"{prefix}accumulation.{weight.name}",
                requires_grad=False,
            )
            for weight in weights
        )
        self.micro_steps = self._state(Tensor(0, mstype.int32), f"{prefix}accumulation.micro_steps")
        self.overflow = self._state(Tensor(False), f"{prefix}accumulation.overflow")
        self.loss_scale = self._state(Tensor(1.0, mstype.float32), f"{prefix}accumulation.loss_scale")

    @staticmethod
    def _state(value, name):
        return Parameter(value, name=name, requires_grad=False)

    def is_first(self):
        """Whether this call is the first of its window."""
        return self.micro_steps == 0

    def is_last(self):
        """Whether this call is the last of its window."""
        return self.micro_steps + 1 >= self.steps

    def window_scale(self, loss_scale):
        """The scale of this window: the one that its first call found. Returns a tensor that is no Parameter."""
        ops.assign(self.loss_scale, ops.select(self.is_first(), loss_scale, self.loss_scale))
        return gradients.copy(self.loss_scale)

    def add(self, grads, overflow):
        """Adds the gradients of a call that is not its window's last."""
        gradients.assign_add(self.gradients, grads)
        ops.assign(self.overflow, overflow)
        ops.assign(self.micro_steps, self.micro_steps + 1)

    def partial_mean(self):
        """The mean over the calls that the window has really had."""
        return gradients.multiply(self.gradients, self.steps / self.micro_steps.astype(mstype.float32))

    def reset(self, after):
        """Empties the window, once `after` has been computed. Not by a multiplication with 0, which keeps a NaN."""
        gradients.assign_zeros(self.gradients, after)
        ops.assign(self.micro_steps, ops.depend(Tensor(0, mstype.int32), after))
        ops.assign(self.overflow, ops.depend(Tensor(False), after))
