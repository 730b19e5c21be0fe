"""The flat tuple of a step's gradients, in which small ones of one shape are stacked: one operator works on many."""

import bisect
import itertools

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients


class Packing(nn.Cell):
    """
    Leaves the gradients of the weights of each network one by one.

    `checks` says whether `check` is of use: not where small gradients could be stacked for it.
    """

    def __init__(self, weights, checks=True):
        super().__init__(auto_prefix=False)
        self.checks = checks
        self._parts = _parts(weights)
        # For each of the flat tuple that of its weights.
        self.dtypes = [weight.dtype for weight in itertools.chain(*weights)]
        # For each gradient whether every element is finite, at little cost if all are.
        self.check = _check_of(itertools.chain(*weights))

    def pack(self, grads):
        """The flat tuple of the gradients of all networks, as the stages up to the optimizers want it."""
        return grads

    def unpack(self, packed):
        """The gradients one by one again."""
        return packed

    def of_network(self, i, packed):
        """Those of network `i`."""
        return packed[self._parts[i][0] : self._parts[i][1]]

    def each_finite(self, packed):
        """For each gradient whether every element is finite."""
        return gradients.each_finite(packed)

    def by_weight(self, flags):
        """The flags in the order of the weights."""
        return flags

    def networks_of_flags(self):
        """For each flag its network. For use in Python."""
        return [i for i, (first, end) in enumerate(self._parts) for _ in range(first, end)]


class Stacking(Packing):
    """
    Stacks small gradients of one shape and dtype, those of each network by themselves.

    A flag of each gradient, bool of shape (N,), has those of single gradients first and those of stacks behind.
    """

    def __init__(self, weights):
        nn.Cell.__init__(self, auto_prefix=False)
        self.checks = True
        self._packings = tuple(map(gradients.packing_of, weights))
        self._weight_parts = _parts(weights)
        self._parts = _parts([(*alone, *groups) for alone, groups, _ in self._packings])
        alone, stacked = [], []
        for (first, _), (its_alone, groups, _) in zip(self._weight_parts, self._packings):
            alone += [first + i for i in its_alone]
            stacked += [first + i for group in groups for i in group]
        self._flagged = alone + stacked
        self._order = Tensor(np.argsort(self._flagged), mstype.int32)
        all_weights = list(itertools.chain(*weights))
        self.dtypes = []
        for its, (its_alone, groups, _) in zip(weights, self._packings):
            self.dtypes += [its[i].dtype for i in (*its_alone, *(group[0] for group in groups))]
        self._check_alone = _check_of(all_weights[i] for i in alone)

    def pack(self, grads):
        packed = ()
        for i, packing in enumerate(self._packings):
            packed += gradients.pack(grads[self._weight_parts[i][0] : self._weight_parts[i][1]], packing)
        return packed

    def unpack(self, packed):
        grads = ()
        for i, packing in enumerate(self._packings):
            grads += gradients.unpack(self.of_network(i, packed), packing)
        return grads

    def check(self, packed):
        return self._flags(self._check_alone, packed)

    def each_finite(self, packed):
        return self._flags(gradients.each_finite, packed)

    def _flags(self, of_alone, packed):
        alone, flags = (), ()
        for i, (its_alone, groups, _) in enumerate(self._packings):
            its = self.of_network(i, packed)
            alone += its[: len(its_alone)]
            for j in range(len(groups)):
                flags += (gradients.each_row_finite(its[len(its_alone) + j]),)
        if alone:
            flags = (of_alone(alone), *flags)
        return ops.concat(flags) if len(flags) > 1 else flags[0]

    def by_weight(self, flags):
        return ops.gather(flags, self._order, 0)

    def networks_of_flags(self):
        ends = [end for _, end in self._weight_parts]
        return [bisect.bisect_right(ends, place) for place in self._flagged]


def make_packing(weights, packs):
    """Stacks gradients, if it may and there are any to stack."""
    can_pack = any(groups for _, groups, _ in map(gradients.packing_of, weights))
    return Stacking(weights) if packs and can_pack else Packing(weights, checks=not can_pack)


def _check_of(weights):
    """How to check single gradients. A small one is looked through at the cost of a sum."""
    small = all(gradients.is_small(weight.shape) for weight in weights)
    return gradients.each_finite if small else gradients.check_large


def _parts(tuples):
    """Where each tuple starts and ends in the flat tuple of all of them."""
    ends = list(itertools.accumulate(map(len, tuples)))
    return tuple(zip([0, *ends], ends))
