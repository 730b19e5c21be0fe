"""The check of a call that is made before it is known what becomes of its step."""

from mindspore import nn

from ms_lossscale.step.scaling import Unscale
from ms_lossscale.step.stage import ForwardState, Mean
from ms_lossscale.step.step import Check


class CheckOfCall(nn.Cell):
    """
    Unscales and checks the gradients of a call, as :class:`End` does. Returns the gradients, whether they or anything
    else overflowed, and whether what the forward wrote did, a tuple of bools of shape :math:`()`.
    """

    def __init__(self, forward_state: ForwardState, unscale: Unscale, mean: Mean, check: Check) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.mean = mean
        self.check = check

    def construct(self, grads, weights, scale, saved):
        of_state = self.forward_state.overflowed(saved)
        checked = self.check(self.mean(self.unscale(grads, scale), weights), of_state, ())
        # Indexed rather than unpacked: graph mode warns about unused names.
        return checked[0], checked[1], of_state
