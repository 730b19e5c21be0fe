"""What a user gives to be looked at: a network or a training cell, and batches."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Optional

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.dataset import Dataset

from ms_lossscale._arguments import check_cell, describe
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.step.forward_backward import inputs_of
from ms_lossscale.step.returned import described

_CURE_OF_NETWORKS = "Pass a network that returns the loss, an nn.WithLossCell say, or a training cell of ms_lossscale."
_TENSORS = (Tensor, np.ndarray)
_INPUTS = (*_TENSORS, int, float)
_CURE_OF_BATCHES = "Pass a list with a tuple of the network's inputs for each batch, or a dataset."


class TrainedPart(NamedTuple):
    """One loss and what it trains."""

    # Goes before the names of the network's cells: empty for one network.
    prefix: str
    # Returns the loss, and what the loss is differentiated by.
    network: nn.Cell
    weights: tuple
    # Which item of the tuple that the network returns is the loss; None for no tuple.
    item: Optional[int] = None
    # Of a training cell: the network's number, which of a batch's inputs each network takes (None for all), the cell's
    # name, for error messages, and its present scale for this loss.
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
                f"Network {self.number} must return a Tensor, the loss, but it returned {described(output)}. "
                f"{_CURE_OF_NETWORKS}"
            )
        return output


def trained_parts(owner, network, parameters=None):
    """The parts of a network that is trained by `parameters` (None: by all that are trainable), or of a cell."""
    check_cell(owner, "network", network, _CURE_OF_NETWORKS)
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


def as_inputs(owner, name, batch):
    """A batch as a tuple of Tensors, and of numbers where there are some."""
    if isinstance(batch, _TENSORS):
        batch = (batch,)
    is_tuple = isinstance(batch, (list, tuple)) and all(isinstance(each, _INPUTS) for each in batch)
    # Numbers alone are no batch.
    if not is_tuple or (batch and not any(isinstance(each, _TENSORS) for each in batch)):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a Tensor, a NumPy array, or a tuple of them and of numbers, "
            f"but got {describe(batch)}. {_CURE_OF_BATCHES}"
        )
    return tuple(Tensor(each) if isinstance(each, np.ndarray) else each for each in batch)


class _Kept:
    """What an iterator gives, kept so that it can be gone through again, also if that was broken off."""

    def __init__(self, iterator):
        self._iterator = iterator
        self._kept = []

    def __iter__(self):
        yield from self._kept
        for batch in self._iterator:
            self._kept.append(batch)
            yield batch


def for_several_passes(batches):
    """The batches, as what can be gone through several times."""
    return _Kept(batches) if isinstance(batches, Iterator) else batches


def each_batch(owner, batches):
    """Yields the batches as tuples of Tensors, with a progress bar if it takes long. Raises if there is none."""
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
    """The iterable, with a progress bar if tqdm is installed; `total` is how many there are, None if unknown."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iterable
    # On a terminal only, and only for what takes longer than two seconds.
    return tqdm(iterable, total=total, desc=description, unit=unit, delay=2, leave=False, disable=None)
