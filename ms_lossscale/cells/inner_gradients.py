"""Notices a loss that depends on a gradient taken in its forward, since PyNative mode loses second derivatives."""

import sys
import warnings

from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale._mindspore import says_that_gradients_are_lost
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


class NoticesInnerGradients(nn.Cell):
    """
    Gives the training cells a warning, once, in PyNative mode. It does not concern gradients that the loss is not
    differentiated through, because of `ops.stop_gradient`, say, or since they only move weights for a while.
    """

    _left_to_ask = _MOST
    # The network whose loss depends on a gradient that it takes.
    _takes_gradient = None

    def _notice_gradient(self, grads):
        """Takes what PyNative mode has computed while it records. Returns the same."""
        forward = _forward_that_runs() if self._left_to_ask else None
        if forward is None:
            return grads
        self._left_to_ask -= 1
        return _Probe(lambda: object.__setattr__(self, "_takes_gradient", forward)).of_each(grads)

    def _warn_of_inner_gradient(self):
        name = f"'{type(self._takes_gradient.network).__name__}'"
        if self._several_networks:
            name = f"network {self._takes_gradient.number} ({name})"
        self._left_to_ask = 0
        object.__setattr__(self, "_takes_gradient", None)
        warnings.warn(
            f"{says_that_gradients_are_lost(self._owner, name)} by some operators (on CPU ops.matmul and "
            f"convolutions): the step may lack them. Train in graph mode, which keeps them, or take the gradient with "
            f"InputGradient, also one by weights, of a Cell that takes them as an input.",
            RuntimeWarning,
            stacklevel=3,
        )


def _forward_that_runs():
    """Returns the ForwardBackward whose network runs, or None."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not ForwardBackward._scaled_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
