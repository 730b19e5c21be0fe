"""What is trained by what: the networks of a user, or of a training cell, with their weights."""

from typing import NamedTuple, Optional

from mindspore import Parameter, Tensor, nn

from ms_lossscale._check import check_cell, describe
from ms_lossscale.alternating_train_one_step_cell import AlternatingTrainOneStepCell
from ms_lossscale.forward_backward import SharedForwardBackward
from ms_lossscale.network_inputs import inputs_of
from ms_lossscale.transaction import Transaction

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
    - **loss_scale** (Union[float, None]) - The training cell's present scale for it; None for no training cell.
    """

    prefix: str
    network: nn.Cell
    weights: tuple
    item: Optional[int] = None
    number: int = 0
    network_inputs: Optional[tuple] = None
    loss_scale: Optional[float] = None

    def inputs(self, batch):
        """Those of a batch's inputs that the network takes."""
        return inputs_of(self.number, self.network_inputs, batch)

    def loss(self, *inputs):
        """Runs the network forward."""
        output = self.network(*inputs)
        if self.item is not None:
            output = output[self.item]
        if not isinstance(output, Tensor):
            raise TypeError(f"The network must return a Tensor, the loss, but it returned {describe(output)}. {_CURE}")
        return output


def trained_parts(owner, network, parameters=None):
    """The parts of a network that is trained by `parameters` (None: by all that are trainable), or of a cell."""
    check_cell(owner, "network", network, _CURE)
    phases = _phases(network)
    if phases is None:
        return [TrainedPart("", network, _check_parameters(owner, network, parameters))]
    if parameters is not None:
        raise ValueError(
            f"For '{owner}', the argument 'parameters' must be None for a training cell, which knows what it trains, "
            f"but got {describe(parameters)}."
        )
    parts = [part for phase in phases for part in _parts_of(phase)]
    if len({id(part.network) for part in parts}) == 1:
        return [part._replace(network_inputs=network.network_inputs) for part in parts]
    return [
        part._replace(prefix=f"networks[{i}]", number=i, network_inputs=network.network_inputs)
        for i, part in enumerate(parts)
    ]


def _phases(cell):
    """The transactions of a training cell; None for any other cell."""
    if isinstance(cell, AlternatingTrainOneStepCell):
        return list(cell.phases)
    if isinstance(cell, Transaction):
        return [cell]
    return None


def _parts_of(transaction):
    scale = transaction.loss_scale.get_loss_scale()
    for forward_backward in transaction.forward_backwards:
        if isinstance(forward_backward, SharedForwardBackward):
            for item, weights in enumerate(forward_backward.weights_of_each):
                yield TrainedPart("", forward_backward.network, tuple(weights), item, loss_scale=scale)
        else:
            item = 0 if forward_backward.has_aux else None
            yield TrainedPart("", forward_backward.network, tuple(forward_backward.weights), item, loss_scale=scale)


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
