"""The loss scale within a step: read once, multiplied in and divided out, moved once by its law."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients


def scaled(loss, scale):
    """What is differentiated: float32 first, since a float16 loss times the scale may be infinite."""
    return loss.astype(mstype.float32) * scale


class Scaling(nn.Cell):
    """
    The scale where each call is a step.

    Args:
        loss_scale (LossScale): The scale and its law.
        leave_division (bool): Whether the division is left to the gradients' transforms, which multiply all the same.
    """

    def __init__(self, loss_scale, leave_division):
        super().__init__(auto_prefix=False)
        self.loss_scale = loss_scale
        self.unscale = LeftToTransforms() if leave_division else Unscale(1.0)

    def read(self):
        """The scale of this step."""
        return gradients.copy(self.loss_scale.scale_value)

    def adjust(self, scale, overflow):
        """Moves the scale by its law, from the one that the step used."""
        ops.assign(self.loss_scale.scale_value, self.loss_scale.advance(scale, overflow))

    def back_off(self, scale, overflow):
        """Moves the scale by its law, for the next try of the same step."""
        self.adjust(scale, overflow)

    def state_of_tries(self):
        """All that a try moves."""
        return list(self.loss_scale.get_parameters())


class WindowScaling(nn.Cell):
    """
    The scale where the calls of a window are one step: they use the one that the first call found.

    Args:
        loss_scale (LossScale): The scale and its law.
        state (WindowState): Holds the window's scale.
        steps (int): Calls in a full window, over which gradients are averaged.
    """

    def __init__(self, loss_scale, state, steps):
        super().__init__(auto_prefix=False)
        self.loss_scale = loss_scale
        self.state = state
        # Of a larger scale, Unscale would multiply by a subnormal number: all gradients would be zero.
        loss_scale.limit(steps)
        loss_scale.mark_when_set(state.loss_scale)
        self.unscale = Unscale(1.0 / steps)

    def read(self):
        scale = ops.select(self.state.is_first(), self.loss_scale.scale_value, self.state.loss_scale)
        ops.assign(self.state.loss_scale, scale)
        return self.state.scale()

    def adjust(self, scale, overflow):
        # What was set by hand within the window is for the next one, as it is.
        present = self.loss_scale.scale_value
        next_scale = self.loss_scale.advance(scale, overflow)
        is_set = ops.logical_or(self.state.scale_is_set(), ops.not_equal(present, scale))
        ops.assign(present, ops.select(is_set, present, next_scale))

    def back_off(self, scale, overflow):
        # The window goes on at the lower scale; it holds gradients that are unscaled.
        present, is_set = self.loss_scale.scale_value, self.state.scale_is_set()
        is_next = ops.logical_or(is_set, ops.not_equal(present, scale))
        next_scale = self.loss_scale.advance(scale, overflow)
        ops.assign(present, ops.select(is_next, present, next_scale))
        ops.assign(self.state.loss_scale, ops.select(is_set, -next_scale, next_scale))

    def state_of_tries(self):
        return [*self.loss_scale.get_parameters(), self.state.loss_scale]


class Unscale(nn.Cell):
    """
    Divides by the scale, in float32, and multiplies by the share that a call has in its step.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients.
        - **scale** (Tensor) - The scale that they hold.

    Outputs:
        Tuple of the gradients and of what they are still to be divided by.
    """

    def __init__(self, share):
        super().__init__(auto_prefix=False)
        self._share, self._one = Tensor(share, mstype.float32), Tensor(1.0, mstype.float32)

    def construct(self, grads, scale):
        return gradients.multiply(grads, self._share / scale), self._one


class LeftToTransforms(nn.Cell):
    """Divides nothing. Inputs and outputs as those of :class:`Unscale`."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, grads, scale):
        return grads, scale
