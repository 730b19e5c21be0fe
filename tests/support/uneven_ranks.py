"""
What the ranks of a job train for `test_uneven_ranks.py`: other numbers of tokens on each, or a batch that only one of
them sees, with a loss that is high or not a number.
"""

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm

from ms_lossscale import (
    DynamicLossScale,
    ManualStep,
    NormSpike,
    ScaledTrainOneStepCell,
    ShardedOptimizer,
    SimultaneousTrainOneStepCell,
    SkipCondition,
)
from support import retried_networks, sloped_networks, token_networks
from support.data_parallel_training import parallel, record
from support.retried_networks import Slope
from support.sloped_networks import Slopes
from support.token_networks import Tokens, tensors
from support.training import state

# The valid tokens of both ranks in each call of a cell with so many calls in a cycle. The last cycle is flushed.
TOKENS = {
    1: ((1, 5), (4, 0), (0, 0), (6, 2)),
    2: ((1, 5), (4, 0), (0, 0), (0, 0), (6, 2), (3, 1)),
    3: ((2, 5), (1, 1), (0, 4), (0, 3), (5, 1)),
}
CLIP_NORM = 0.5


def tokens(rank, call, steps):
    return token_networks.batch(TOKENS[steps][call][rank], seed=10 * call + rank)


def weighted(place, mean):
    """Each step by itself, with a cycle of two, and with cycles of three, the last of which is flushed."""
    parallel(place, mean=mean)
    for steps in TOKENS:
        network = Tokens()
        keywords = {"clip_norm": CLIP_NORM} if steps == 1 else {}
        cell = ScaledTrainOneStepCell(
            network,
            token_networks.sgd(network),
            DynamicLossScale(2.0**10),
            weighted=True,
            gradient_accumulation_steps=steps,
            **keywords,
        ).set_train()
        yield {"weight": network.weight.asnumpy().copy()}
        for call in range(len(TOKENS[steps])):
            outputs = cell(*tensors(tokens(place.rank, call, steps)))
            values = {"weight": network.weight.asnumpy().copy(), "loss": outputs[0].asnumpy()}
            yield {**values, "overflow": outputs[1].asnumpy()}
        cell.flush()
        yield {"weight": network.weight.asnumpy().copy()}


def weighted_mean(place):
    yield from weighted(place, mean=True)


def weighted_sum(place):
    yield from weighted(place, mean=False)


def weighted_pair(place):
    """One network has weights, the other returns the mean over its tokens: its gradient is a mean or a sum as ever."""
    for mean in (True, False):
        parallel(place, mean=mean)
        networks = [Tokens("a"), Tokens("b", weight_as="mean")]
        cell = SimultaneousTrainOneStepCell(
            networks,
            [token_networks.sgd(network) for network in networks],
            [DynamicLossScale(2.0**10), DynamicLossScale(2.0**8)],
            weighted=[True, False],
        ).set_train()
        before = [network.weight.asnumpy().copy() for network in networks]
        cell(*tensors(tokens(place.rank, 0, 1)))
        for network, its in zip(networks, before):
            yield {"before": its, "after": network.weight.asnumpy().copy()}


# The norms of the gradients of both ranks, which point in one direction, or in opposite ones.
SPIKES = ((4.0, 4.0), (5.0, 3.0), (40.0, -39.0), (12.0, 6.0), (20.0, 20.0), (3.0, 5.0))
MAX_NORM, WINDOW, Z_SCORE = 15.0, 2, 2.5


def spike(z_score=Z_SCORE):
    return NormSpike(MAX_NORM, z_score=z_score, window=WINDOW)


def spikes(place):
    """The gradients are averaged, and then summed."""
    for mean in (True, False):
        parallel(place, mean=mean)
        cell = sloped_networks.cell(DynamicLossScale(2.0**10), skip_conditions=[spike()])
        for norms in SPIKES:
            yield record(cell, cell(sloped_networks.with_norm(norms[place.rank])))


class PartlyOwn(nn.Cell):
    """The gradient of its weight is `x`, and that of a weight that each rank has for itself is `its`."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(4, np.float32)), name="weight")
        self.own = Parameter(Tensor(np.ones(2, np.float32)), name="own", layerwise_parallel=True)

    def construct(self, x, its):
        return (self.weight * x).sum() + (self.own * its).sum()


# For each call the gradients of a rank's own weight.
OWN_GRADIENTS = ((1.0, 2.0), (2.0, 3.0), (1.0, 40.0), (2.0, 2.0))


def own_spikes(place):
    """Only one rank's own weight has a large gradient in the third call."""
    parallel(place, "hybrid_parallel")
    network = PartlyOwn()
    optimizer = nn.SGD(network.trainable_params(), sloped_networks.LEARNING_RATE)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), skip_conditions=[spike()]).set_train()
    for own in OWN_GRADIENTS:
        yield record(cell, cell(sloped_networks.with_norm(4.0), Tensor([own[place.rank], 0.0], mstype.float32)))


def sharded_spikes(place):
    """The same training with the plain optimizer, and with one whose state the ranks share."""
    parallel(place)
    cells = {}
    for name in ("plain", "sharded"):
        network = Slopes()
        make = nn.Momentum if name == "plain" else lambda *arguments: ShardedOptimizer(arguments[0], momentum)
        optimizer = make([network.weight], sloped_networks.LEARNING_RATE, 0.5)
        loss_scale = DynamicLossScale(2.0**10)
        cells[name] = ScaledTrainOneStepCell(network, optimizer, loss_scale, skip_conditions=[spike()]).set_train()
    for norms in SPIKES:
        values = {}
        for name, cell in cells.items():
            its = record(cell, cell(sloped_networks.with_norm(norms[place.rank])))
            values.update((f"{name}/{key}", value) for key, value in its.items())
        yield values


def sharded_cycles(place):
    """
    What a sharded cell would save within a cycle of three calls: one with a condition, whose losses only one rank sees
    as NaN, and one with weights.
    """
    parallel(place)
    network = Slopes()
    cell = ScaledTrainOneStepCell(
        network,
        ShardedOptimizer([network.weight], momentum),
        DynamicLossScale(START, backoff_if_loss_not_finite=False),
        gradient_accumulation_steps=3,
        skip_conditions=[HighLoss(HIGHEST, place.rank)],
    ).set_train()
    cell(sloped_networks.with_norm((4.0, 8.0)[place.rank]))
    yield state(cell)
    cell(sloped_networks.with_norm((4.0, float("nan"))[place.rank]))
    yield state(cell)
    network = Tokens()
    cell = ScaledTrainOneStepCell(
        network,
        ShardedOptimizer([network.weight], momentum),
        DynamicLossScale(2.0**10),
        gradient_accumulation_steps=3,
        weighted=True,
    ).set_train()
    for call in range(3):
        cell(*tensors(tokens(place.rank, call, 3)))
        yield state(cell)


def momentum(shards):
    return nn.Momentum(shards, sloped_networks.LEARNING_RATE, 0.5)


class HighLoss(SkipCondition):
    """Asks to skip where the loss is high, and counts what it observed."""

    def __init__(self, highest, rank):
        super().__init__()
        self.highest, self.one = Tensor(highest), Tensor(1.0)
        # A user's own condition may differ between ranks.
        self.rank = rank
        self.observed = Parameter(Tensor(0.0), name="observed", requires_grad=False)

    def observe(self, loss, norm):
        ops.assign_add(self.observed, self.one)

    def construct(self, loss, norm):
        return loss > self.highest


# A loss is about twice its norm. In the second call one rank's is high, in the fourth that of the other.
HIGHEST = 50.0
LOSSES = ((4.0, 4.0), (4.0, 64.0), (5.0, 3.0), (64.0, -70.0), (2.0, 3.0), (3.0, 2.0))


def high_losses(place):
    """Each call by itself, and cycles of two."""
    parallel(place)
    for steps in (1, 2):
        network = Slopes()
        cell = ScaledTrainOneStepCell(
            network,
            nn.Momentum([network.weight], sloped_networks.LEARNING_RATE, 0.5),
            DynamicLossScale(2.0**10, scale_window=2),
            gradient_accumulation_steps=steps,
            ema_decay=0.5,
            # Of a cycle, the mean of the losses counts.
            skip_conditions=[HighLoss(HIGHEST / steps, place.rank)],
        ).set_train()
        yield state(cell)
        for norms in LOSSES:
            yield record(cell, cell(sloped_networks.with_norm(norms[place.rank])))


START = 2.0**12
# What both ranks see in each call: a good batch, a bad one, which is NaN at any scale, or a steep one, which overflows
# above 2**10.
BAD_CALLS = {
    1: ("gg", "bg", "gb", "bb", "gs", "gg"),
    2: ("gg gg", "bg gg", "gg gb", "bg gs", "sg gb", "gg sg", "gg gg"),
}


def slope_inputs(kind):
    if kind == "b":
        return Tensor(np.full((4, 3), np.nan, np.float32)), Tensor(np.float32(np.nan))
    return retried_networks.inputs(60.0 if kind == "s" else 1.0)


def bad_batches(place, steps, retries=0):
    parallel(place)
    network = Slope()
    cell = ScaledTrainOneStepCell(
        network,
        nn.SGD([network.weight], retried_networks.LEARNING_RATE),
        DynamicLossScale(START, backoff_if_loss_not_finite=False),
        gradient_accumulation_steps=steps,
        max_retries=retries,
    ).set_train()
    for step in BAD_CALLS[steps]:
        for kinds in step.split():
            outputs = cell(*slope_inputs(kinds[place.rank]))
        counters = np.array(list(cell.counters().values()))
        yield {**record(cell, outputs), "counters": counters, "of_losses": np.array(cell.skip_reasons()["loss"])}


def bad_steps(place):
    yield from bad_batches(place, steps=1)


def bad_cycles(place):
    yield from bad_batches(place, steps=2)


def bad_steps_retried(place):
    yield from bad_batches(place, steps=1, retries=3)


def bad_cycles_retried(place):
    yield from bad_batches(place, steps=2, retries=3)


# For each call of a ManualStep, in cycles of two: the valid tokens of both ranks, and the loss that a rank reports.
MANUAL_CALLS = (
    ((1, 5), (1.0, 1.0)),
    ((4, 0), (1.0, 1.0)),
    ((2, 2), (1.0, 100.0)),
    ((3, 1), (1.0, 1.0)),
    ((2, 6), (float("nan"), 1.0)),
    ((1, 1), (1.0, 1.0)),
    ((3, 5), (1.0, 1.0)),
)


def manual(place):
    """The mode is stand_alone, and hooks average the gradients. The last cycle is flushed."""
    all_reduce, share = ops.AllReduce(), 1.0 / place.ranks

    def averaged(grad):
        return all_reduce(grad) * share

    network = Tokens()
    network.weight.register_hook(averaged)
    step = ManualStep(
        network,
        token_networks.sgd(network),
        DynamicLossScale(START, backoff_if_loss_not_finite=False),
        gradient_accumulation_steps=2,
        skip_conditions=[HighLoss(HIGHEST / 2, place.rank)],
        gradients_reduced=GlobalComm.WORLD_COMM_GROUP,
    ).set_train()

    def forward(x, y, mask, factor):
        loss, count = network(x, y, mask)
        return step.scale(loss * factor), loss * factor, count

    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)
    yield state(step)
    for call, (counts, reported) in enumerate(MANUAL_CALLS):
        data = token_networks.batch(counts[place.rank], seed=10 * call + place.rank)
        factor = reported[place.rank] if np.isnan(reported[place.rank]) else 1.0
        inputs = step.begin(*tensors(data), Tensor(np.float32(factor)))
        (_, loss, count), grads = value_and_grad(*inputs)
        overflow = step.end(grads, loss=loss * 0.0 + reported[place.rank], weight=count)
        yield {**state(step), "overflow": overflow.asnumpy()}
    step.flush()
    yield state(step)
