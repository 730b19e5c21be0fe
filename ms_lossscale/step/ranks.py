"""What the ranks of a parallel job exchange within a step."""

from mindspore import Tensor, get_auto_parallel_context, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size

from ms_lossscale import _primitives as prim


class Ranks(nn.Cell):
    """
    Connects ranks. Without a `grad_reducer`, something else reduces the gradients. `group` is the name of the
    communication group, or True for all ranks; `mean` says whether gradients become their mean over them.
    """

    def __init__(self, group=True, mean=True, grad_reducer=None):
        super().__init__(auto_prefix=False)
        # Set once: MindSpore takes no Cell where there was another attribute.
        self.grad_reducer = grad_reducer
        group = GlobalComm.WORLD_COMM_GROUP if group is True else group
        self._all_reduce = ops.AllReduce(group=group)
        self._zero = Tensor(0.0, mstype.float32)
        self._share = Tensor(1.0 / get_group_size(group) if mean else 1.0, mstype.float32)

    def agree(self, flag):
        """Returns whether any rank found it."""
        # A sum, since MindSpore on CPU has no maximum; of floats, since a small integer type could wrap around.
        return prim.greater(self._all_reduce(prim.cast(flag, mstype.float32)), self._zero)

    def sum(self, number):
        """Returns the sum of a number over the ranks."""
        return self._all_reduce(number)

    def sum_like_gradients(self, number):
        """Returns the sum, or the mean, over the ranks, whichever the gradients become."""
        return prim.mul(self._all_reduce(number), self._share)


def ranks_of(parallel_mode, gradients_reduced, grad_reducer):
    """Returns what connects the ranks, None for a process that trains alone."""
    if gradients_reduced:
        return Ranks(gradients_reduced)
    if parallel_mode == "stand_alone":
        return None
    return Ranks(True, get_auto_parallel_context("gradients_mean"), grad_reducer)


def are_split(ranks, weights):
    """Returns for each weight whether each rank has its own part of it, so that its gradient is not reduced."""
    return tuple(ranks is not None and weight.layerwise_parallel for weight in weights)
