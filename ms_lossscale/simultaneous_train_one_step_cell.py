"""The training cell for several networks that share one verdict and one update."""

from mindspore import nn, ops

from ms_lossscale import gradients
from ms_lossscale._check import check_cells, check_one_each
from ms_lossscale.transaction import Transaction


class SimultaneousTrainOneStepCell(Transaction):
    def __init__(
        self,
        networks,
        optimizers,
        loss_scale=None,
        *,
        network_inputs=None,
        has_aux=False,
        forward_state=(),
        after_update=None,
        overflow_detector=None,
    ):
        owner = type(self).__name__
        optimizers = check_cells(owner, "optimizers", optimizers)
        if isinstance(networks, nn.Cell) and not isinstance(networks, nn.CellList):
            networks = (networks,)
        else:
            networks = check_cells(owner, "networks", networks)
            check_one_each(owner, networks, optimizers)
        super().__init__(
            owner,
            networks,
            optimizers,
            loss_scale,
            network_inputs=network_inputs,
            has_aux=has_aux,
            forward_state=forward_state,
            after_update=after_update,
            overflow_detector=overflow_detector,
        )
        self._has_aux = has_aux

    def construct(self, *inputs):
        losses, auxes, overflow, loss_scale = self.step(*inputs)
        losses = ops.stack(gradients.sums(losses))
        output = (ops.ReduceSum()(losses), overflow, loss_scale, losses)
        if self._has_aux:
            return (*output, auxes)
        return output
