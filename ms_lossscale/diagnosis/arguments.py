"""The arguments of the diagnoses: a network or a training cell, and batches."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, Union

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.dataset import Dataset

from ms_lossscale._arguments import Batches, check_cell, describe
from ms_lossscale._mindspore import written_class
from ms_lossscale._values import not_finite_weights
from ms_lossscale.cells.manual_step import ManualStep
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.function_network import FunctionNetwork, as_network, name_of, variables_of
from ms_lossscale.step.step import inputs_of

# A training cell takes batches in the place of parameters.
ParametersOrBatches = Union[Sequence[Parameter], Batches, None]
_TENSORS = (Tensor, np.ndarray)
_INPUTS = (*_TENSORS, int, float)
_CURE_OF_BATCHES = "Pass a list with a tuple of the network's inputs for each batch, or a dataset."


class TrainedPart(NamedTuple):
    """One loss and what it trains."""

    # The prefix of the names of the network's cells, empty for one network.
    prefix: str
    # The network returns the loss, which is differentiated with respect to the weights.
    network: nn.Cell
    weights: tuple
    # The loss's place in the tuple that the network returns; None if it returns no tuple.
    item: Optional[int] = None
    # For a training cell: the number of the network, a function that selects its inputs, and the present scale of this
    # loss.
    number: int = 0
    inputs: Callable[[tuple], tuple] = tuple
    loss_scale: Optional[float] = None
    # The number of the optimizer that trains the weights, None for the only one.
    optimizer: Optional[int] = None
    # The smallest loss scale that is of use: 1, unless a training cell goes lower.
    floor: float = 1.0

    def names(self):
        """Returns the name of each cell by its id; the network itself goes by its class."""
        named = self.network.cells_and_names()
        return {id(cell): join_names(self.prefix, name) or kind_of(cell) for name, cell in named}


def not_finite_weights_of(parts):
    """Returns how many values are not finite, by weight, for those weights of the networks that have any."""
    return not_finite_weights(each for part in parts for each in (*part.weights, *part.network.get_parameters()))


def kind_of(cell):
    """Returns the class of a cell, as its author wrote it, or the name of a function."""
    return name_of(cell).rpartition(".")[2] if isinstance(cell, FunctionNetwork) else written_class(cell).__name__


def join_names(*names):
    """Returns the name of a cell within a cell."""
    return ".".join(filter(None, names))


def trained_parts(owner, network, parameters=None):
    """Returns the parts of a training cell, or of a network trained by `parameters` (None: all trainable ones)."""
    used = variables_of(inspect.unwrap(network)).values() if callable(network) else ()
    if any(isinstance(its, ManualStep) for its in (network, *used)):
        raise TypeError(
            f"For '{owner}', the argument 'network' must be what a step differentiates, but got a 'ManualStep', or a "
            f"function that uses one. Pass a function that returns the loss, unscaled, and, where it is taken, "
            f"step.parameters."
        )
    if isinstance(network, type) or not callable(network):
        check_cell(owner, "network", network, "Pass a network or function that returns the loss, or a training cell.")
    if not isinstance(network, TrainingCell):
        network = as_network(owner, "network", network)
        return [TrainedPart("", network, _check_parameters(owner, network, parameters))]
    if parameters is not None:
        what = "the argument 'parameters' must be None for a training cell, which knows what it trains"
        raise ValueError(f"For '{owner}', {what}, but got {describe(parameters)}.")
    # There is one scale for all losses of a step, or one for each.
    losses = [
        (loss_scale, *loss)
        for step in network.steps
        for loss_scale, loss in zip(itertools.cycle(step.transaction.loss_scales), step.forwards_and_backwards.losses())
    ]
    several = len({id(its_network) for _, its_network, _, _ in losses}) > 1
    parts = []
    for i, (loss_scale, its_network, weights, item) in enumerate(losses):
        number, prefix = (i, f"networks[{i}]") if several else (0, "")
        inputs = functools.partial(inputs_of, type(network).__name__, number, network.network_inputs)
        optimizer, floor = (i if len(losses) > 1 else None), min(1.0, loss_scale.min_loss_scale or 1.0)
        its_scale = loss_scale.get_loss_scale()
        parts.append(TrainedPart(prefix, its_network, weights, item, number, inputs, its_scale, optimizer, floor))
    return parts


def _check_parameters(owner, network, parameters):
    what = f"For '{owner}', the argument 'parameters' must be a list of the network's Parameters"
    if parameters is None:
        parameters = network.trainable_params()
        what = f"For '{owner}', the network must have trainable parameters"
    elif isinstance(parameters, tuple) and all(isinstance(each, ParameterTuple) for each in parameters):
        # Those of a ManualStep with several optimizers.
        parameters = list(itertools.chain(*parameters))
    if not isinstance(parameters, (list, tuple)) or not all(isinstance(each, Parameter) for each in parameters):
        raise TypeError(f"{what}, but got {describe(parameters)}. Pass network.trainable_params().")
    own = {id(parameter) for parameter in network.get_parameters()}
    strangers = [parameter.name for parameter in parameters if id(parameter) not in own]
    if strangers or not parameters:
        raise ValueError(f"{what}, but {f'it does not have {strangers}' if strangers else 'there are none'}.")
    return tuple(parameters)


def as_inputs(owner, name, batch):
    """Returns a batch as a tuple of Tensors, with numbers where the batch has them."""
    if isinstance(batch, _TENSORS):
        batch = (batch,)
    is_tuple = isinstance(batch, (list, tuple)) and all(isinstance(each, _INPUTS) for each in batch)
    # Numbers alone are not a batch.
    if not is_tuple or (batch and not any(isinstance(each, _TENSORS) for each in batch)):
        what = f"the argument '{name}' must be a Tensor, a NumPy array, or a tuple of them and of numbers"
        raise TypeError(f"For '{owner}', {what}, but got {describe(batch)}. {_CURE_OF_BATCHES}")
    return tuple(Tensor(each) if isinstance(each, np.ndarray) else each for each in batch)


def each_batch(owner, batches):
    """Yields the batches as tuples of Tensors. Raises if there are none."""
    if isinstance(batches, Dataset):
        batches = batches.create_tuple_iterator(num_epochs=1)
    elif isinstance(batches, _TENSORS) or not hasattr(batches, "__iter__"):
        what = "the argument 'batches' must be an iterable of batches"
        raise TypeError(f"For '{owner}', {what}, but got {describe(batches)}. {_CURE_OF_BATCHES}")
    count = 0
    for count, batch in enumerate(batches, start=1):
        yield as_inputs(owner, f"batches[{count - 1}]", batch)
    if count == 0:
        raise ValueError(f"For '{owner}', the argument 'batches' must not be empty. {_CURE_OF_BATCHES}")
