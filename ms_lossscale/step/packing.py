"""The flat tuple of a step's gradients. Small ones of one shape are stacked: then one operator works on many."""

import bisect
import itertools

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim


class Packing(nn.Cell):
    """
    Keeps each gradient by itself.

    `checks` says whether to use `check`: not if small gradients could be stacked for it.
    """

    def __init__(self, weights, checks=True):
        super().__init__(auto_prefix=False)
        self.checks = checks
        self._parts = _parts(weights)
        # For each entry of the flat tuple, the dtype of its weights.
        self.dtypes = [weight.dtype for weight in itertools.chain(*weights)]
        self._are_small = _are_small(itertools.chain(*weights))

    def pack(self, grads):
        """Returns the flat tuple of all networks' gradients, in the form that the stages up to the optimizers take."""
        return grads

    def unpack(self, packed):
        """Returns the gradients one by one again."""
        return packed

    def of_network(self, i, packed):
        """Returns the part of network `i`."""
        return packed[self._parts[i]]

    def check(self, packed):
        """Returns for each gradient whether every element is finite. It costs little if all are."""
        return gradients.check(packed, self._are_small)

    def any_nonzero(self, packed):
        """Returns whether any gradient of a network is not zero: a tuple with a bool of shape () for each network."""
        flags = ()
        for i in range(len(self._parts)):
            flags += (gradients.any_nonzero(self.of_network(i, packed)),)
        return flags

    def each_finite(self, packed):
        """Returns for each gradient whether every element is finite."""
        return gradients.each_finite(packed)

    def by_weight(self, flags):
        """The flags in the order of the weights."""
        return flags

    def networks_of_flags(self):
        """Returns for each flag its network. For use in Python."""
        return [i for i, part in enumerate(self._parts) for _ in range(part.start, part.stop)]


class Stacking(Packing):
    """
    Stacks the small gradients of one shape and dtype, separately for each network.

    The flags for each gradient, bool of shape (N,), begin with those of single gradients; the stacks' follow.
    """

    def __init__(self, weights):
        nn.Cell.__init__(self, auto_prefix=False)
        self.checks = True
        self._packings = tuple(map(gradients.packing_of, weights))
        self._weight_parts = _parts(weights)
        self._parts = _parts([(*alone, *groups) for alone, groups, _ in self._packings])
        alone, stacked = [], []
        for part, (its_alone, groups, _) in zip(self._weight_parts, self._packings):
            alone += [part.start + i for i in its_alone]
            stacked += [part.start + i for group in groups for i in group]
        self._flagged = alone + stacked
        self._order = Tensor(np.argsort(self._flagged), mstype.int32)
        all_weights = list(itertools.chain(*weights))
        self.dtypes = []
        for its, (its_alone, groups, _) in zip(weights, self._packings):
            self.dtypes += [its[i].dtype for i in (*its_alone, *(group[0] for group in groups))]
        self._are_small = _are_small(all_weights[i] for i in alone)

    def pack(self, grads):
        packed = ()
        for i in range(len(self._packings)):
            packed += gradients.pack(grads[self._weight_parts[i]], self._packings[i])
        return packed

    def unpack(self, packed):
        grads = ()
        for i in range(len(self._packings)):
            grads += gradients.unpack(self.of_network(i, packed), self._packings[i])
        return grads

    def check(self, packed):
        return self._flags(True, packed)

    def each_finite(self, packed):
        return self._flags(False, packed)

    def _flags(self, checks, packed):
        alone, flags = (), ()
        for i in range(len(self._packings)):
            its_alone = self._packings[i][0]
            groups = self._packings[i][1]
            its = self.of_network(i, packed)
            alone += its[: len(its_alone)]
            for j in range(len(groups)):
                flags += (gradients.each_row_finite(its[len(its_alone) + j]),)
        if alone:
            its = gradients.check(alone, self._are_small) if checks else gradients.each_finite(alone)
            flags = (its, *flags)
        return prim.concat(flags) if len(flags) > 1 else flags[0]

    def by_weight(self, flags):
        return ops.gather(flags, self._order, 0)

    def networks_of_flags(self):
        ends = [part.stop for part in self._weight_parts]
        return [bisect.bisect_right(ends, place) for place in self._flagged]


def make_packing(weights, packs):
    """Returns what stacks gradients, if `packs` allows it and there are any to stack."""
    can_pack = any(groups for _, groups, _ in map(gradients.packing_of, weights))
    return Stacking(weights) if packs and can_pack else Packing(weights, checks=not can_pack)


def _are_small(weights):
    return tuple(gradients.is_small(weight.shape) for weight in weights)


def _parts(tuples):
    """Returns the slice of each tuple in the flat tuple of all."""
    ends = list(itertools.accumulate(map(len, tuples)))
    return tuple(map(slice, [0, *ends], ends))
