"""An optimizer whose state the ranks of a data-parallel job share (ZeRO-1)."""

from collections.abc import Iterable, Sequence
from typing import Any, Callable, Union

from mindspore import Parameter, ParameterTuple, Tensor, get_auto_parallel_context, nn
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size, get_rank

from ms_lossscale._arguments import describe
from ms_lossscale._mindspore import unlisted_state
from ms_lossscale.sharding.layout import LAYOUT, SHARD, Layout, part_of, values_of
from ms_lossscale.sharding.refusals import as_list, check_groups, check_needs_no_whole_weight
from ms_lossscale.sharding.shards import Shards
from ms_lossscale.sharding.states import find_states

_OWNER = "ShardedOptimizer"
_DTYPES = (mstype.float32, mstype.float16, mstype.bfloat16)

Groups = Sequence[dict[str, Any]]


class ShardedOptimizer(nn.Cell):
    """
    An optimizer whose state the ranks of a data-parallel job share (ZeRO stage 1). Pass it to any training cell as its
    optimizer.

    Each weight is flattened, padded with zeros, and split evenly over the ranks of `msrun`. Each rank keeps the
    optimizer's state only for its own parts, called shards. In a step that did not overflow, it updates its shards, and
    an all-gather writes the shards of all ranks into the weights. Everything else in the step stays the same. The
    weights are those of the plain optimizer, bit for bit, if the optimizer works element by element and its kernel
    rounds an element the same way wherever it is in a vector. (On CPU the kernel of `nn.Adam` does not: the last bit
    may differ.) With one rank it is the plain optimizer.

    Shards and their state are float32. For a float16 weight they are its master copy, and get the gradient before it is
    rounded to float16. If something else writes the weights, for example an `after_update` or a checkpoint, the shards
    take over the new values in the next step.

    Construct it after :func:`mindspore.set_auto_parallel_context`, like the training cell. On each rank,
    :func:`mindspore.save_checkpoint` of the cell saves that rank's part; see :func:`merge_shards`.

    Args:
        parameters (Union[list[Parameter], list[dict]]): The weights, or groups of them, as for MindSpore's optimizers.
        optimizer (Callable): A function that gets this rank's shards in the same form as `parameters`, and returns
            their optimizer. Each shard is a vector, whatever the weight's shape, and during this call it has the name
            of its weight. With one rank the function gets `parameters` themselves.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of the whole weights, in the order of `parameters`.

    Raises:
        TypeError: If `parameters` are neither Parameters nor groups of them, or if `optimizer` can't be called or does
            not return a Cell.
        ValueError: If the optimizer needs whole weights: `nn.Lamb`, `nn.LARS`, `nn.thor`, `nn.AdaFactor` and others
            that use norms or shapes of layers, and `grad_centralization` in a group. If it has other parameters than
            the shards, or state that may or may not belong to the elements of a shard. If a weight is
            `layerwise_parallel`, or not float32, float16 or bfloat16. If `parallel_mode` is
            ``"semi_auto_parallel"`` or ``"auto_parallel"`` .
        RuntimeError: If `parallel_mode` is not ``"stand_alone"`` and communication is not initialised.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, ShardedOptimizer
        >>> network = nn.Dense(4, 1)
        >>> optimizer = ShardedOptimizer(
        ...     network.trainable_params(), lambda shards: nn.AdamWeightDecay(shards, learning_rate=1e-3)
        ... )
        >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale())
        >>> x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
        >>> loss, overflow, loss_scale = cell(x, y)
        >>> print(overflow, loss_scale)
        False 65536.0
    """

    def __init__(
        self,
        parameters: Union[Iterable[Parameter], Groups],
        optimizer: Callable[[Any], nn.Cell],
    ) -> None:
        super().__init__(auto_prefix=False)
        if not callable(optimizer) or isinstance(optimizer, nn.Cell):
            raise TypeError(
                f"For '{_OWNER}', the argument 'optimizer' must be a function that returns an optimizer of the shards "
                f"that it gets, but got {describe(optimizer)}. Pass lambda shards: nn.Adam(shards), say."
            )
        parameters = as_list(_OWNER, parameters)
        weights = check_groups(_OWNER, parameters)
        self.rank, self.ranks = _place()
        self.is_split = self.ranks > 1
        shards = _make_shards(weights, self.rank, self.ranks) if self.is_split else weights
        self.optimizer = optimizer(_in_the_same_form(parameters, weights, shards))
        check_needs_no_whole_weight(_OWNER, self.optimizer, shards)
        if not self.is_split:
            self.parameters = self.optimizer.parameters
            return
        of_shards = {id(shard): weight for shard, weight in zip(shards, weights)}
        shards = ParameterTuple(self.optimizer.parameters)
        self.parameters = ParameterTuple([of_shards[id(shard)] for shard in shards])
        self.shards = Shards(shards, self.parameters)
        self.unlisted_state = ParameterTuple(unlisted_state(self.optimizer))
        states, shared = find_states(_OWNER, self.optimizer, shards)
        self.layout_read = Layout(
            self.rank,
            self.ranks,
            bool(get_auto_parallel_context("gradients_mean")),
            {weight.name: list(weight.shape) for weight in self.parameters},
            [weight.name for weight in self.parameters if weight.dtype != mstype.float32],
            {state.name: weight for state, weight in states},
            [state.name for state in shared],
        )
        for parameter in (*shards, *(state for state, _ in states)):
            parameter.layerwise_parallel = True
            parameter.name = SHARD + parameter.name
        self.layout = Parameter(self.layout_read.as_tensor(), name=LAYOUT, requires_grad=False, layerwise_parallel=True)

    def construct(self, grads):
        if not self.is_split:
            return self.optimizer(grads)
        parts = self.shards.parts(grads)
        followed = self.shards.follow()
        done = self.optimizer(parts)
        return followed, done, self.shards.gather()

    @property
    def global_step(self) -> Parameter:
        """The optimizer's, for callbacks."""
        return self.optimizer.global_step

    @property
    def learning_rate(self) -> Any:
        """The optimizer's, for callbacks."""
        return self.optimizer.learning_rate

    @property
    def dynamic_lr(self) -> bool:
        """The optimizer's, for callbacks."""
        return self.optimizer.dynamic_lr

    @property
    def is_group_lr(self) -> bool:
        """The optimizer's, for callbacks."""
        return self.optimizer.is_group_lr

    def check_ranks(self, owner: str) -> None:
        """Raises a ValueError unless a training cell that is constructed now has as many ranks as this optimizer."""
        ranks = _place()[1]
        if ranks != self.ranks:
            raise ValueError(
                f"For '{owner}', the {_OWNER} must have been constructed for as many ranks as the cell has, but it "
                f"splits weights over {self.ranks}, and the cell has {ranks}. Call mindspore.communication.init() and "
                f"mindspore.set_auto_parallel_context(parallel_mode='data_parallel', gradients_mean=True) before "
                f"either is constructed."
            )


def _place():
    """Returns this rank, and the number of ranks."""
    mode = get_auto_parallel_context("parallel_mode")
    if mode == "stand_alone":
        return 0, 1
    if mode not in ("data_parallel", "hybrid_parallel"):
        raise ValueError(
            f"For '{_OWNER}', the parallel_mode must be 'data_parallel', but got '{mode}', in which MindSpore splits "
            f"weights and their state itself: see enable_parallel_optimizer of set_auto_parallel_context."
        )
    if not GlobalComm.INITED:
        raise RuntimeError(
            f"For '{_OWNER}', the parallel_mode is '{mode}', but communication is not initialised. Call "
            f"mindspore.communication.init() before it is constructed, and start the script with msrun."
        )
    return get_rank(), get_group_size()


def _make_shards(weights, rank, ranks):
    """Returns this rank's shards. They have the weights' names, by which optimizers choose what decays."""
    for weight in weights:
        if weight.layerwise_parallel or weight.dtype not in _DTYPES:
            was = "layerwise_parallel" if weight.layerwise_parallel else f"of dtype {weight.dtype}"
            raise ValueError(
                f"For '{_OWNER}', weights must be float32, float16 or bfloat16 and the same on all ranks, but "
                f"'{weight.name}' is {was}. Give it to an optimizer of its own."
            )
    return [
        Parameter(Tensor(part_of(values_of(weight), rank, ranks)), name=weight.name, layerwise_parallel=True)
        for weight in weights
    ]


def _in_the_same_form(parameters, weights, shards):
    """Returns the shards in the form in which `parameters` holds the weights: one by one, or in groups."""
    if parameters[0] is weights[0]:
        return shards
    shard_of = {id(weight): shard for weight, shard in zip(weights, shards)}
    groups = []
    for group in parameters:
        group = dict(group)
        for key in {"params", "order_params"} & group.keys():
            its = group[key]
            group[key] = shard_of[id(its)] if isinstance(its, Parameter) else [shard_of[id(each)] for each in its]
        groups.append(group)
    return groups
