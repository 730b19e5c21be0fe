"""A step that only asks whether it would overflow."""

from typing import Union

from mindspore import nn

from ms_lossscale._mindspore import Compiled, UseInOutermostGraph
from ms_lossscale.step.attempts import Attempt, CopyOfInputs, GradientCheck
from ms_lossscale.step.forward_state import AnyForwardState
from ms_lossscale.step.scaling import AnyScaling


class Trial(nn.Cell):
    """
    Runs a batch forward and backward at the loss scale as it is, and checks the gradients: the first half of a step,
    made of the same stages. Then the side effects of the forward are undone, and nothing was updated.

    Args:
        scaling (Union[Scaling, OwnScaling]): The loss scale, also within an accumulation cycle that uses another one.
        forward_state (Union[NoForwardState, ForwardState]): What the forward writes.
        attempt (Attempt): Runs the networks once.
        check (GradientCheck): Checks their gradients.
        keep (Cell): Copies the inputs, if the networks may write into them.

    Inputs:
        - **\\*inputs** - The inputs of the step.

    Outputs:
        Tensor, whether an overflow was found, as :class:`FoundOverflow` gives it.
    """

    def __init__(
        self,
        scaling: AnyScaling,
        forward_state: AnyForwardState,
        attempt: Attempt,
        check: Union[GradientCheck, Compiled],
        keep: Union[CopyOfInputs, nn.Identity],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.scaling = scaling
        self.forward_state = forward_state
        self.attempt = attempt
        self.check = check
        self.keep = keep
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self, *inputs):
        inputs, saved = self.forward_state.save(self.keep(self.use_parameters(inputs)))
        scale = self.scaling.read()
        # Indexed rather than unpacked: graph mode warns about unused names.
        backward = self.attempt(scale, inputs, saved)[2]
        overflow = self.check(*backward, saved)[3]
        self.forward_state.restore_call(saved)
        return overflow
