"""How weights are split evenly over ranks, and what a checkpoint says of it."""

import json
import math
from typing import NamedTuple

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

# Before the names of shards and of their state, and before those of masters in a merged checkpoint.
SHARD, MASTER = "shard.", "master."
LAYOUT = "shard.layout"


def values_of(tensor):
    """The values of a tensor in NumPy, which knows no bfloat16: then in float32."""
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()


def shard_length(size, ranks):
    """The elements of each rank's part, the padding included."""
    return -(-size // ranks)


def part_of(values, rank, ranks, dtype=np.float32):
    """A rank's part of an array: of its elements one after the other, zeros where they have ended."""
    part = np.zeros(shard_length(values.size, ranks), dtype)
    own = values.reshape(-1)[rank * part.size : (rank + 1) * part.size]
    part[: own.size] = own
    return part


def whole_of(parts, shape):
    """The array, of the parts of all ranks."""
    return np.concatenate(parts)[: math.prod(shape)].reshape(shape)


class Layout(NamedTuple):
    """
    What a rank's part of a checkpoint holds. Names are those that the plain optimizer would use, without the prefix
    that a training cell with several optimizers puts before them.

    Args:
        rank (int): Whose part it is.
        ranks (int): How many there are.
        averages (bool): Whether the ranks average their gradients, and do not sum them.
        weights (dict): From the name of each weight to its shape.
        masters (list): The names of the weights that are not float32, whose shards are their masters.
        states (dict): From the name of each split state to that of its weight.
        shared (list): The names of the optimizer's state that is the same on all ranks.
    """

    rank: int
    ranks: int
    averages: bool
    weights: dict
    masters: list
    states: dict
    shared: list

    def as_tensor(self):
        """For a checkpoint, which keeps nothing but numbers."""
        return Tensor(np.frombuffer(json.dumps(self._asdict()).encode(), np.uint8))

    @classmethod
    def of(cls, tensor):
        """Reads it; a ValueError if it is not one."""
        try:
            return cls(**json.loads(tensor.asnumpy().astype(np.uint8).tobytes()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"its '{LAYOUT}' can't be read") from error

    def splits(self):
        """From the name of what is split to its weight's: the shards and their state."""
        return {**{weight: weight for weight in self.weights}, **self.states}

    def of_all(self):
        """What all parts of one checkpoint have in common."""
        return self._replace(rank=0)
