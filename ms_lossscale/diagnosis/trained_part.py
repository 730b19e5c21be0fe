"""What is trained by what: the networks of a user, or of a training cell, with their weights."""

import itertools
from typing import NamedTuple, Optional

from mindspore import Parameter, Tensor, nn

from ms_lossscale._arguments import check_cell, describe
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.step.nested import described
from ms_lossscale.step.network_inputs import inputs_of

_CURE = "Pass a network that returns the loss, an nn.WithLossCell say, or a training cell of ms_lossscale."


class TrainedPart(NamedTuple):
    """
    One loss and what it trains.

    - **prefix** (str) - Goes before the names of the network's cells: empty for one network.
    - **network** (Cell) - Returns the loss.
    - **weights** (tuple[Parameter]) - What the loss is differentiated by.
    - **item** (Union[int, None]) - Which item of the tuple that the network returns is the loss; None for no tuple.
    - **number** (int) - The network's number in the training cell.
    - **network_inputs** (Union[tuple, None]) - For each network, which of a batch's inputs it takes; None for all.
    - **cell** (str) - The training cell's name, for error messages.
    - **loss_scale** (Union[float, None]) - The training cell's present scale for it; None for no training cell.
    """

    prefix: str
    network: nn.Cell
    weights: tuple
    item: Optional[int] = None
    number: int = 0
    network_inputs: Optional[tuple] = None
    cell: str = ""
    loss_scale: Optional[float] = None

    def inputs(self, batch):
        """Those of a batch's inputs that the network takes."""
        return inputs_of(self.cell, self.number, self.network_inputs, batch)

    def loss(self, *inputs):
        """Runs the network forward."""
        output = self.network(*inputs)
        if self.item is not None:
            output = output[self.item]
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Network {self.number} must return a Tensor, the loss, but it returned {described(output)}. {_CURE}"
            )
        return output


def trained_parts(owner, network, parameters=None):
    """The parts of a network that is trained by `parameters` (None: by all that are trainable), or of a cell."""
    check_cell(owner, "network", network, _CURE)
    if not isinstance(network, TrainingCell):
        return [TrainedPart("", network, _check_parameters(owner, network, parameters))]
    if parameters is not None:
        raise ValueError(
            f"For '{owner}', the argument 'parameters' must be None for a training cell, which knows what it trains, "
            f"but got {describe(parameters)}."
        )
    parts = [
        TrainedPart(
            "",
            its_network,
            weights,
            item,
            network_inputs=network.network_inputs,
            cell=type(network).__name__,
            loss_scale=loss_scale.get_loss_scale(),
        )
        for step in network.steps
        # One that all losses share, or one for each.
        for loss_scale, (its_network, weights, item) in zip(
            itertools.cycle(step.loss_scales), step.forwards_and_backwards.losses()
        )
    ]
    if len({id(part.network) for part in parts}) == 1:
        return parts
    return [part._replace(prefix=f"networks[{i}]", number=i) for i, part in enumerate(parts)]


def _check_parameters(owner, network, parameters):
    if parameters is None:
        trainable = tuple(network.trainable_params())
        if not trainable:
            raise ValueError(f"For '{owner}', the network has no trainable parameters to differentiate by.")
        return trainable
    what = f"For '{owner}', the argument 'parameters' must be a list of the network's Parameters"
    if not isinstance(parameters, (list, tuple)) or not all(isinstance(each, Parameter) for each in parameters):
        raise TypeError(f"{what}, but got {describe(parameters)}. Pass network.trainable_params().")
    if not parameters:
        raise ValueError(f"{what}, but it is empty. Pass network.trainable_params().")
    own = {id(parameter) for parameter in network.get_parameters()}
    strangers = [parameter.name for parameter in parameters if id(parameter) not in own]
    if strangers:
        raise ValueError(f"{what}, but the network does not have {', '.join(strangers)}.")
    return tuple(parameters)
