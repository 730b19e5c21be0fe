"""What the ranks of a parallel job do together within a step; alone there is nothing to do."""

from typing import Union

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype


class Alone(nn.Cell):
    """One process: gradients, overflows and numbers are its own. The methods are those of :class:`Ranks`."""

    exchanges = False

    def __init__(self):
        super().__init__(auto_prefix=False)

    def reduce(self, grads):
        return grads

    def agree(self, overflow):
        return overflow

    def sum(self, number):
        return number

    def own(self, weights):
        return (False,) * len(weights)


class Ranks(nn.Cell):
    """
    The ranks of a parallel job, whatever its `parallel_mode`.

    Args:
        grad_reducer (Cell): MindSpore's, for the gradients of this step. In ``"semi_auto_parallel"`` and
            ``"auto_parallel"`` it does nothing: the backward reduces the gradients there.
    """

    exchanges = True

    def __init__(self, grad_reducer):
        super().__init__(auto_prefix=False)
        self.grad_reducer = grad_reducer
        self._all_reduce = ops.AllReduce()
        self._zero = Tensor(0.0, mstype.float32)

    def reduce(self, grads):
        """The gradients, summed or averaged over the ranks."""
        return self.grad_reducer(grads)

    def agree(self, overflow):
        """Whether any rank says so."""
        # A sum, since MindSpore on CPU has no maximum; of floats, since a small integer type could wrap around.
        return self._all_reduce(overflow.astype(mstype.float32)) > self._zero

    def sum(self, number):
        """The sum of a number over the ranks."""
        return self._all_reduce(number)

    def own(self, weights):
        """For each weight whether every rank has a part of its own of it, whose gradient `reduce` leaves alone."""
        return tuple(weight.layerwise_parallel for weight in weights)


AnyRanks = Union[Alone, Ranks]
