"""The arguments of the diagnoses: a network or a training cell, and batches."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, Optional

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.dataset import Dataset

from ms_lossscale._arguments import check_cell, describe
from ms_lossscale._mindspore import written_class
from ms_lossscale._values import not_finite_weights
from ms_lossscale.cells.manual_step import ManualStep
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.function_network import FunctionNetwork, as_network, name_of
from ms_lossscale.step.forward_backward import inputs_of
from ms_lossscale.step.returned import described, loss_first

_CURE_OF_NETWORKS = (
    "Pass a network or a function that returns the loss, an nn.WithLossCell say, or a training cell of ms_lossscale."
)
_TENSORS = (Tensor, np.ndarray)
_INPUTS = (*_TENSORS, int, float)
_CURE_OF_BATCHES = "Pass a list with a tuple of the network's inputs for each batch, or a dataset."

CASTS_BY_HAND = (
    "Casts that are written in a construct, such as x.astype(mstype.float16), can't be switched from outside: change "
    "them in the code."
)


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

    @property
    def is_function(self):
        """Whether the network is a function, which may return more after its loss, as for `value_and_grad`."""
        return isinstance(self.network, FunctionNetwork)

    def loss(self, *inputs):
        """Runs the network forward."""
        output = self.network(*inputs)
        if self.item is not None:
            output = output[self.item]
        elif self.is_function and isinstance(output, tuple) and output:
            output = loss_first(name_of(self.network), self.number, output)[0]
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Network {self.number} must return a Tensor, the loss, but it returned {described(output)}. "
                f"{_CURE_OF_NETWORKS}"
            )
        return output

    def not_finite_weights(self):
        """Returns how many values are not finite, by weight, for those weights of the network that have any."""
        return not_finite_weights((*self.weights, *self.network.get_parameters()))

    def named_cells(self):
        """Returns the cells by their names; the network itself goes by its class."""
        named = self.network.cells_and_names()
        return {join_names(self.prefix, name) or kind_of(cell): cell for name, cell in named}

    def cell_names(self):
        """Returns the name of each cell by its id."""
        return {id(cell): name for name, cell in self.named_cells().items()}

    def owners(self):
        """Returns the name of the cell that holds each parameter by the parameter's id."""
        named = self.named_cells().items()
        return {id(each): name for name, cell in named for each in cell.get_parameters(expand=False)}


def kind_of(cell):
    """Returns the class of a cell, as its author wrote it, or the name of a function."""
    return name_of(cell).rpartition(".")[2] if isinstance(cell, FunctionNetwork) else written_class(cell).__name__


def not_finite_weights_of(parts):
    """Returns the same for all weights of several parts."""
    return {name: count for part in parts for name, count in part.not_finite_weights().items()}


def join_names(*names):
    """Returns the name of a cell within a cell."""
    return ".".join(filter(None, names))


def trained_parts(owner, network, parameters=None):
    """Returns the parts of a training cell, or of a network trained by `parameters` (None: all trainable ones)."""
    if isinstance(network, ManualStep):
        raise TypeError(
            f"For '{owner}', the argument 'network' must be what a step differentiates, but got a "
            f"'{type(network).__name__}', which does not know it. Pass the function that you differentiate, "
            f"forward(x, y), and, where this takes parameters, the step's 'parameters'."
        )
    if isinstance(network, type) or not callable(network):
        check_cell(owner, "network", network, _CURE_OF_NETWORKS)
    if not isinstance(network, TrainingCell):
        network = as_network(owner, "network", network)
        return [TrainedPart("", network, _check_parameters(owner, network, parameters))]
    if parameters is not None:
        raise ValueError(
            f"For '{owner}', the argument 'parameters' must be None for a training cell, which knows what it trains, "
            f"but got {describe(parameters)}."
        )
    losses = [
        (loss_scale.get_loss_scale(), min(1.0, loss_scale.min_loss_scale or 1.0), *loss)
        for step in network.steps
        # There is one scale for all losses, or one for each.
        for loss_scale, loss in zip(itertools.cycle(step.scaling.loss_scales), step.forwards_and_backwards.losses())
    ]
    several = len({id(its_network) for _, _, its_network, _, _ in losses}) > 1
    parts = []
    for i, (loss_scale, floor, its_network, weights, item) in enumerate(losses):
        number, prefix = (i, f"networks[{i}]") if several else (0, "")
        inputs = functools.partial(inputs_of, type(network).__name__, number, network.network_inputs)
        optimizer = i if len(losses) > 1 else None
        parts.append(TrainedPart(prefix, its_network, weights, item, number, inputs, loss_scale, optimizer, floor))
    return parts


def _check_parameters(owner, network, parameters):
    if parameters is None:
        trainable = tuple(network.trainable_params())
        if not trainable:
            raise ValueError(f"For '{owner}', the network has no trainable parameters to differentiate by.")
        return trainable
    what = f"For '{owner}', the argument 'parameters' must be a list of the network's Parameters"
    if isinstance(parameters, tuple) and parameters and all(isinstance(each, ParameterTuple) for each in parameters):
        # Those of a ManualStep with several optimizers.
        parameters = tuple(itertools.chain(*parameters))
    if not isinstance(parameters, (list, tuple)) or not all(isinstance(each, Parameter) for each in parameters):
        raise TypeError(f"{what}, but got {describe(parameters)}. Pass network.trainable_params().")
    if not parameters:
        raise ValueError(f"{what}, but it is empty. Pass network.trainable_params().")
    own = {id(parameter) for parameter in network.get_parameters()}
    strangers = [parameter.name for parameter in parameters if id(parameter) not in own]
    if strangers:
        raise ValueError(f"{what}, but the network does not have {', '.join(strangers)}.")
    return tuple(parameters)


def as_inputs(owner, name, batch):
    """Returns a batch as a tuple of Tensors, with numbers where the batch has them."""
    if isinstance(batch, _TENSORS):
        batch = (batch,)
    is_tuple = isinstance(batch, (list, tuple)) and all(isinstance(each, _INPUTS) for each in batch)
    # Numbers alone are not a batch.
    if not is_tuple or (batch and not any(isinstance(each, _TENSORS) for each in batch)):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a Tensor, a NumPy array, or a tuple of them and of numbers, "
            f"but got {describe(batch)}. {_CURE_OF_BATCHES}"
        )
    return tuple(Tensor(each) if isinstance(each, np.ndarray) else each for each in batch)


def each_batch(owner, batches):
    """Yields the batches as tuples of Tensors, with a progress bar if it takes long. Raises if there are none."""
    if isinstance(batches, Dataset):
        total = batches.get_dataset_size()
        batches = batches.create_tuple_iterator(num_epochs=1)
    elif isinstance(batches, _TENSORS) or not hasattr(batches, "__iter__"):
        raise TypeError(
            f"For '{owner}', the argument 'batches' must be an iterable of batches, but got {describe(batches)}. "
            f"{_CURE_OF_BATCHES}"
        )
    else:
        total = len(batches) if hasattr(batches, "__len__") else None
    count = 0
    for count, batch in enumerate(with_progress_bar(batches, total, owner, "batch"), start=1):
        yield as_inputs(owner, f"batches[{count - 1}]", batch)
    if count == 0:
        raise ValueError(f"For '{owner}', the argument 'batches' must not be empty. {_CURE_OF_BATCHES}")


def with_progress_bar(iterable, total, description, unit):
    """Returns the iterable, with a progress bar if tqdm is installed. `total` is None if unknown."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iterable
    # Only on a terminal, and only if it takes longer than two seconds.
    return tqdm(iterable, total=total, desc=description, unit=unit, delay=2, leave=False, disable=None)
