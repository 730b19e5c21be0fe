"""A trial of a loss scale: the first half of a step."""

from typing import Union

from mindspore import nn, ops

from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import Compiled
from ms_lossscale.step.check_of_call import CheckOfCall
from ms_lossscale.step.forward_backward import ForwardsAndBackwards
from ms_lossscale.step.kept_inputs import KeptInputs
from ms_lossscale.step.scaling import Scaling
from ms_lossscale.step.stage import ForwardState


class Trial(nn.Cell):
    """
    Runs a batch forward and backward at the present loss scale. It is the first half of a step, made of the same
    stages. It undoes the side effects of the forward, and updates nothing.

    Returns whether an overflow was found, and a tuple with, for each optimizer, whether any gradient is not zero.
    """

    def __init__(
        self,
        scaling: Scaling,
        forward_state: ForwardState,
        keep: KeptInputs,
        forwards_and_backwards: ForwardsAndBackwards,
        check_of_call: Union[CheckOfCall, Compiled],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.scaling = scaling
        self.forward_state = forward_state
        self.keep = keep
        self.forwards_and_backwards = forwards_and_backwards
        self.check_of_call = check_of_call
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def construct(self, *inputs):
        inputs, saved = self.forward_state.save(self.keep(self.use_parameters(inputs)))
        scale = self.scaling.read()
        # Indexed rather than unpacked: graph mode warns about unused names.
        tried = self.forwards_and_backwards(scale, inputs)
        grads = tried[2]
        overflow = self.check_of_call(grads, tried[3], scale, saved)[1]
        # As in Undo: there may be nothing to restore.
        overflow = ops.depend(overflow, self.forward_state.restore_call(saved))
        return overflow, self.forwards_and_backwards.packing.any_nonzero(grads)
