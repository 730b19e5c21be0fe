"""The flat tuple of a step's gradients, in which small ones of one shape are stacked: one operator works on many."""

import itertools

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients


class Unpacked(nn.Cell):
    """
    Leaves the gradients one by one. The methods are those of :class:`Packing`.

    Args:
        weights (list[ParameterTuple]): The weights of each network.
    """

    def __init__(self, weights):
        super().__init__(auto_prefix=False)
        self._parts = _parts(weights)

    def pack(self, grads):
        return grads

    def unpack(self, packed):
        return packed

    def of_network(self, i, packed):
        return packed[self._parts[i][0] : self._parts[i][1]]

    def sizes(self):
        return _sizes(self._parts)

    def each_finite(self, packed):
        return gradients.each_finite(packed)


class Packing(nn.Cell):
    """
    Stacks small gradients of one shape and dtype, those of each network by themselves.

    Args:
        weights (list[ParameterTuple]): The weights of each network.
    """

    def __init__(self, weights):
        super().__init__(auto_prefix=False)
        self._packings = tuple(map(gradients.packing_of, weights))
        self._parts = _parts(weights)
        self._packed_parts = _parts([(*alone, *groups) for alone, groups, _ in self._packings])
        orders = [[first + i for i in where] for (first, _), (_, _, where) in zip(self._parts, self._packings)]
        self._order = Tensor(list(itertools.chain(*orders)), mstype.int32)

    def pack(self, grads):
        """The flat tuple of the gradients of all networks, as the stages up to the optimizers want it."""
        packed = ()
        for i, packing in enumerate(self._packings):
            packed += gradients.pack(grads[self._parts[i][0] : self._parts[i][1]], packing)
        return packed

    def unpack(self, packed):
        """The gradients one by one again."""
        grads = ()
        for i, packing in enumerate(self._packings):
            grads += gradients.unpack(self.of_network(i, packed), packing)
        return grads

    def of_network(self, i, packed):
        """Those of network `i`."""
        return packed[self._packed_parts[i][0] : self._packed_parts[i][1]]

    def sizes(self):
        """For each network how many tensors it has, packed. For use in Python."""
        return _sizes(self._packed_parts)

    def each_finite(self, packed):
        """For each gradient whether every element is finite, bool of shape (N,)."""
        flags = ()
        for i, (alone, groups, _) in enumerate(self._packings):
            its = self.of_network(i, packed)
            if alone:
                flags += (gradients.each_finite(its[: len(alone)]),)
            for j in range(len(groups)):
                flags += (gradients.each_row_finite(its[len(alone) + j]),)
        return ops.gather(ops.concat(flags), self._order, 0)


def make_packing(weights, packs):
    """A Packing, if it may pack and there is something to pack."""
    if packs and any(groups for _, groups, _ in map(gradients.packing_of, weights)):
        return Packing(weights)
    return Unpacked(weights)


def _parts(tuples):
    """Where each tuple starts and ends in the flat tuple of all of them."""
    ends = list(itertools.accumulate(map(len, tuples)))
    return tuple(zip([0, *ends], ends))


def _sizes(parts):
    return [end - start for start, end in parts]
