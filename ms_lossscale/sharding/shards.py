"""What a step does with shards: takes a rank's part of tensors, and gathers the weights."""

import math

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import get_group_size, get_rank

from ms_lossscale import _gradients as gradients
from ms_lossscale.sharding.layout import shard_length

# So many elements are gathered at once, or those of one weight: so much memory it takes besides. And so many of each
# rank: MindSpore's CPU collectives, all-reduce and all-gather alike, fail at times where a rank sends 24 MB at once.
_LARGEST_GATHERED, _LARGEST_SENT = 2**24, 2**21

_to, _slice, _concat, _equal, _select = ops.Cast(), ops.Slice(), ops.Concat(), ops.Equal(), ops.Select()
_map = ops.HyperMap()

_part = ops.MultitypeFuncGraph("part")
_follow = ops.MultitypeFuncGraph("follow")
_whole = ops.MultitypeFuncGraph("whole")


# The operators must be the same on all ranks, also where a rank has nothing but padding: what depends on nothing of the
# other ranks may be computed in another order, and ranks that exchange in different orders fail.
@_part.register("Tensor", "Number", "Number", "Number", "Tensor")
def _part_dense(zeros, begin, length, padding, tensor):
    values = tensor.reshape((-1,))
    if padding:
        values = _concat((values, _to(_slice(zeros, (0,), (padding,)), tensor.dtype)))
    return _to(_slice(values, (begin,), (length,)), mstype.float32)


@_follow.register("Tensor", "Number", "Number", "Number", "Tensor", "Tensor")
def _follow_dense(zeros, begin, length, padding, shard, weight):
    part = _part_dense(zeros, begin, length, padding, weight)
    if weight.dtype != mstype.float32:
        # A master stays as it is unless something else has written its weight.
        rounded = _to(_to(shard, weight.dtype), mstype.float32)
        part = _select(_equal(rounded, part), shard, part)
    return ops.assign(shard, part)


@_whole.register("Tensor", "Number", "Number", "Tensor")
def _whole_dense(gathered, begin, length, weight):
    if length < gathered.shape[1]:
        gathered = _slice(gathered, (0, begin), (gathered.shape[0], length))
    whole = gathered.reshape((-1,))
    if whole.size != weight.size:
        whole = _slice(whole, (0,), (weight.size,))
    return ops.assign(weight, _to(whole, weight.dtype).reshape(weight.shape))


class Shards(nn.Cell):
    """The shards of a rank, which are float32, and in the same order the weights that they are parts of."""

    def __init__(self, shards, weights):
        super().__init__(auto_prefix=False)
        rank, ranks = get_rank(), get_group_size()
        self.shards, self.weights = shards, weights
        # For each weight where this rank's part begins, its length, and the zeros after the weight: fewer than ranks.
        sizes = [math.prod(weight.shape) for weight in weights]
        self._lengths = tuple(shard_length(size, ranks) for size in sizes)
        self._begins = tuple(rank * length for length in self._lengths)
        self._paddings = tuple(length * ranks - size for size, length in zip(sizes, self._lengths))
        self._zeros = Tensor(np.zeros(ranks, np.float32))
        self._ranks = ranks
        self._messages = _messages(weights, self._lengths, min(_LARGEST_GATHERED // ranks, _LARGEST_SENT))
        self._all_gather = ops.AllGather()

    def parts(self, tensors):
        """This rank's part of one tensor for each weight, float32 vectors."""
        return _map(ops.partial(_part, self._zeros), self._begins, self._lengths, self._paddings, tensors)

    def follow(self):
        """Takes over what something else has written into the weights, an `after_update` or a checkpoint say."""
        places = (self._begins, self._lengths, self._paddings)
        return _map(ops.partial(_follow, self._zeros), *places, self.shards, self.weights)

    def gather(self):
        """Writes the shards of all ranks into the weights, in place."""
        written = ()
        for positions, begins, lengths, dtype in self._messages:
            weights = gradients.items(self.weights, positions)
            message = _to(_concat(gradients.items(self.shards, positions)), dtype)
            gathered = self._all_gather(message).reshape((self._ranks, -1))
            written += _map(ops.partial(_whole, gathered), begins, lengths, weights)
        return written


def _messages(weights, lengths, longest):
    """For each message the positions of its weights, where in it their shards begin, their lengths, and its dtype."""
    messages, last = [], {}
    for i, (weight, length) in enumerate(zip(weights, lengths)):
        # Rounded before they are sent: half of the bytes.
        dtype = mstype.float16 if weight.dtype == mstype.float16 else mstype.float32
        if dtype not in last or last[dtype][0] + length > longest:
            last[dtype] = [0, []]
            messages.append((dtype, last[dtype][1]))
        last[dtype][1].append((i, last[dtype][0], length))
        last[dtype][0] += length
    return tuple((*zip(*shards), dtype) for dtype, shards in messages)
