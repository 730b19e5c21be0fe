"""The inputs of networks that are run more than once."""

from mindspore import nn

from ms_lossscale import _gradients as gradients
from ms_lossscale.forward_state.find import may_write_inputs
from ms_lossscale.step.returned import of_each_tensor


class KeptInputs(nn.Cell):
    """Copies the inputs if the networks may write to them."""

    def __init__(self, networks: tuple[nn.Cell, ...]) -> None:
        super().__init__(auto_prefix=False)
        self._copies = may_write_inputs(networks)

    def construct(self, inputs):
        return of_each_tensor(gradients.copy, inputs) if self._copies else inputs
