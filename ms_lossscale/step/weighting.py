"""The mean over things of which each call, and each rank, has another number: tokens, or the boxes in an image."""

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.stage import Alone, Mean


class WeightedMean(Mean):
    """
    Divides gradients of sums by the weights of a step: those of all its calls, on all ranks. Without weights, it leaves
    them as they are.

    Args:
        packing (Packing): Tells which gradients are whose.
        ranks (Alone): The ranks that train together.
        steps (int): The number of calls in a step, by which the gradients have been divided.
        weighted (Sequence[bool]): For each network, whether it has weights. Those of others are 1 in each call, and
            their gradients become a mean or a sum over the ranks as ever.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the step's losses, packed.
        - **weights** (tuple[Tensor]) - For each network the sum of its weights, float32 of shape :math:`()`, or none.
    """

    def __init__(self, packing: Packing, ranks: Alone, steps: int, weighted: Sequence[bool]) -> None:
        super().__init__()
        self.packing = packing
        self.ranks = ranks
        self._steps, self._zero = Tensor(steps, mstype.float32), Tensor(0.0, mstype.float32)
        self._zeros = Tensor(np.zeros(len(weighted), np.float32))
        self._weighted = Tensor(np.array(weighted, bool))

    def construct(self, grads, weights):
        return self._multiplied(grads, self._shares(weights)) if len(weights) > 0 else grads

    def partial(self, grads, cycle_state):
        # The calls of a ManualStep may have no weights.
        share, shares = cycle_state.partial_share(), ()
        for its in self._shares(cycle_state.weights):
            shares += (prim.select(cycle_state.is_weighted, its, share),)
        return self._multiplied(grads, shares)

    def _shares(self, weights):
        """Returns for each network what to multiply its gradients by: 0 if there is nothing in the mean."""
        weights = prim.stack(weights)
        weights = prim.select(self._weighted, self.ranks.sum_like_gradients(weights), weights)
        # Not where they are <= 0: a NaN must stay one.
        return ops.unstack(prim.select(prim.equal(weights, self._zero), self._zeros, self._steps / weights))

    def _multiplied(self, grads, shares):
        multiplied = ()
        for i, share in enumerate(shares):
            multiplied += gradients.multiply(self.packing.of_network(i, grads), share)
        return multiplied
