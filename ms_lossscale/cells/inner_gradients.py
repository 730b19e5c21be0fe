"""Notices a loss that depends on a gradient taken in its forward, since PyNative mode loses second derivatives."""

import sys

from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale._mindspore import says_that_gradients_are_lost
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.step.forward_backward import ForwardBackward

# Of so many gradients in forwards it is asked whether the loss depends on them, which waits for the device.
_MOST = 100


class _Probe(nn.Cell):
    """Passes a gradient on, and calls `is_needed` if the backward brings it anything but zeros."""

    def __init__(self, is_needed):
        super().__init__()
        self._is_needed = is_needed
        # PyNative mode then records the call, even if it has cut the gradient off from what that was computed from.
        self.recorded = Parameter(Tensor(0.0), name="recorded")

    def construct(self, grad, recorded):
        return grad * 1

    def bprop(self, grad, recorded, output, cotangent):
        if (cotangent != 0).any():
            self._is_needed()
        return cotangent, ops.zeros_like(recorded)

    def of_each(self, grads):
        """Passes on a tensor, or each one in nested tuples and lists."""
        if isinstance(grads, (tuple, list)):
            return type(grads)(self.of_each(each) for each in grads)
        return self(grads, self.recorded) if isinstance(grads, Tensor) else grads


class InnerGradients:
    """
    Warns once, in PyNative mode. The warning does not concern gradients that the loss is not differentiated through,
    because of `ops.stop_gradient`, say, or since they only move weights for a while.
    """

    def __init__(self, owner, several_networks):
        self._owner, self._several_networks = owner, several_networks
        self._left_to_ask = _MOST
        # The ForwardBackward of the network whose loss depends on a gradient that it takes.
        self.taken_in = None

    def notice(self, grads):
        """Takes what PyNative mode has computed while it records. Returns the same."""
        forward = _forward_that_runs() if self._left_to_ask else None
        if forward is None:
            return grads
        self._left_to_ask -= 1
        return _Probe(lambda: setattr(self, "taken_in", forward)).of_each(grads)

    def warn(self):
        """Warns of the one that was found."""
        name = f"'{type(self.taken_in.network).__name__}'"
        if self._several_networks:
            name = f"network {self.taken_in.number} ({name})"
        self._left_to_ask, self.taken_in = 0, None
        warn_user(
            f"{says_that_gradients_are_lost(self._owner, name)} by some operators (on CPU ops.matmul and "
            f"convolutions): the step may lack them. Train in graph mode, which keeps them, or take the gradient with "
            f"InputGradient, also one by weights, of a Cell that takes them as an input."
        )


def _forward_that_runs():
    """Returns the ForwardBackward whose network runs, or None."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not ForwardBackward._scaled_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
