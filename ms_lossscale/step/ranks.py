"""What the ranks of a parallel job exchange within a step."""

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size

from ms_lossscale import _primitives as prim
from ms_lossscale.step.stage import Alone


class AgreeingRanks(Alone):
    """
    Connects ranks whose gradients something else reduces: they only agree on what they found. `group` is the name of
    their communication group, or True for all ranks. `mean` says whether the gradients become their mean over the
    ranks, rather than their sum.
    """

    def __init__(self, group, mean=True):
        super().__init__()
        group = GlobalComm.WORLD_COMM_GROUP if group is True else group
        self._all_reduce = ops.AllReduce(group=group)
        self._zero = Tensor(0.0, mstype.float32)
        self._share = Tensor(1.0 / get_group_size(group) if mean else 1.0, mstype.float32)

    def agree(self, overflow):
        # A sum, since MindSpore on CPU has no maximum; of floats, since a small integer type could wrap around.
        return self._all_reduce(overflow.astype(mstype.float32)) > self._zero

    def agree_on_both(self, flag, other):
        sums = ops.unstack(self._all_reduce(prim.stack((flag, other)).astype(mstype.float32)))
        return sums[0] > self._zero, sums[1] > self._zero

    def sum(self, number):
        return self._all_reduce(number)

    def sum_like_gradients(self, number):
        return self._all_reduce(number) * self._share

    def are_split(self, weights):
        return tuple(weight.layerwise_parallel for weight in weights)


class Ranks(AgreeingRanks):
    """
    Connects the ranks of a parallel job, whatever its `parallel_mode`. MindSpore's `grad_reducer` sums or averages the
    gradients over them; in ``"semi_auto_parallel"`` and ``"auto_parallel"`` the backward does so instead.
    """

    exchanges = True

    def __init__(self, grad_reducer, mean):
        super().__init__(True, mean)
        self.grad_reducer = grad_reducer
