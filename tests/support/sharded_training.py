"""
What the ranks of a job train for `test_sharded_optimizer.py`: two cells that differ only in that the ranks share the
state of one cell's optimizers. Both get the same calls, and after each a record holds the state of both.
"""

import json

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.experimental import optim

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    ShardedOptimizer,
    SimultaneousTrainOneStepCell,
    merge_shards,
)
from support.data_parallel_training import ROWS, parallel, rows_of
from support.networks import FEATURES, weight
from support.training import state

CALLS = 20
SAVED = 12
# By call, the ranks whose batch overflows at any scale, and those whose batch overflows at a large one.
OVERFLOWS = {3: (0,), 8: (-1,), 9: (0, -1)}
STEEP = {5: (-1,), 12: (0,)}


class HalfMlp(nn.Cell):
    """
    Mean squared error of two layers that compute in float16. The weights have 15, 5, 5 and 1 elements, which two or
    four ranks can't share evenly, and there is a single number. BatchNorm's statistics are each rank's own.
    """

    def __init__(self, seed=0, dtype=np.float32, prefix=""):
        super().__init__()
        self.hidden = weight(FEATURES, 5, seed=seed, name=f"{prefix}hidden.weight", dtype=dtype)
        self.hidden_bias = weight(5, seed=seed + 1, name=f"{prefix}hidden.beta", dtype=dtype)
        self.output = weight(5, 1, seed=seed + 2, name=f"{prefix}output.weight", dtype=dtype)
        self.output_bias = weight(1, seed=seed + 3, name=f"{prefix}output.bias", dtype=dtype)
        self.factor = Parameter(Tensor(1.0, mstype.float32), name=f"{prefix}factor")
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.norm.update_parameters_name(prefix)

    def construct(self, x, y):
        half = mstype.float16
        hidden = ops.matmul(x.astype(half), self.hidden.astype(half)) + self.hidden_bias.astype(half)
        output = ops.matmul(ops.tanh(hidden), self.output.astype(half)) + self.output_bias.astype(half)
        loss = ops.square(output.astype(mstype.float32) * self.factor - y).mean()
        return ops.depend(loss, self.norm(x))


class Decaying(nn.Optimizer):
    """A user's own optimizer: sign descent with momentum, whose state it makes itself."""

    def __init__(self, params, learning_rate):
        super().__init__(learning_rate, params)
        self.momentum = ParameterTuple(
            Parameter(Tensor(np.zeros(each.shape, np.float32)), name=f"own.{each.name}") for each in self.parameters
        )
        self.calls = Parameter(Tensor(0, mstype.int32), name="own_calls")
        self.one, self.share = Tensor(1, mstype.int32), Tensor(0.25, mstype.float32)

    def construct(self, gradients):
        rate = self.get_lr()
        done = (ops.assign_add(self.calls, self.one),)
        for i, gradient in enumerate(gradients):
            moved = self.momentum[i] + self.share * (ops.sign(gradient) - self.momentum[i])
            ops.assign(self.momentum[i], moved)
            done += (ops.assign_sub(self.parameters[i], rate * moved),)
        return done


class Bounded(nn.Cell):
    """An `after_update` that writes the weights, as for a WGAN's critic."""

    def __init__(self, weights):
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple(weights)
        self.low, self.high = Tensor(-0.9, mstype.float32), Tensor(0.9, mstype.float32)

    def construct(self):
        for each in self.weights:
            ops.assign(each, ops.clip_by_value(each, self.low, self.high))


def plain(parameters, make):
    return make(parameters)


def scale():
    return DynamicLossScale(2.0**10, scale_window=3)


def adam_in_groups(optimizer, weights):
    """Returns an optimizer with weight decay and scheduled learning rates by group."""
    groups = [
        {"params": weights[1::2], "lr": nn.ExponentialDecayLR(0.05, 0.5, 8)},
        {"params": weights[::2], "weight_decay": 0.1, "lr": nn.CosineDecayLR(0.001, 0.02, 12)},
        {"order_params": weights},
    ]
    return optimizer(groups, lambda shards: nn.AdamWeightDecay(shards, 0.01))


def one_network_cell(optimizer):
    network = HalfMlp()
    trained = adam_in_groups(optimizer, network.trainable_params())
    return ScaledTrainOneStepCell(network, trained, scale(), clip_norm=0.5, ema_decay=0.75)


def cycle_cell(optimizer):
    """Returns a cell with cycles of three calls; the 20 calls end within a cycle."""
    network = HalfMlp()
    weights = network.trainable_params()
    groups = [{"params": weights[:2], "weight_decay": 0.1, "lr": 0.05}, {"params": weights[2:]}]
    trained = optimizer(groups, lambda shards: optim.AdamW(shards, 0.02))
    return ScaledTrainOneStepCell(
        network, trained, scale(), gradient_accumulation_steps=3, max_retries=3, clip_norm=0.5, ema_decay=0.75
    )


def pair_of_networks():
    return [HalfMlp(seed, prefix=f"{i}.") for i, seed in enumerate((0, 10))]


def make_with_rates(shards):
    return nn.AdamWeightDecay(shards, [0.05 / (i + 1) for i in range(30)])


def simultaneous_cell(optimizer):
    networks = pair_of_networks()
    trained = [
        optimizer(networks[0].trainable_params(), lambda shards: nn.Momentum(shards, 0.05, 0.9)),
        optimizer(networks[1].trainable_params(), make_with_rates),
    ]
    return SimultaneousTrainOneStepCell(
        networks, trained, [scale(), scale()], network_inputs=[(0, 1), (2, 3)], max_retries=2, clip_value=0.25
    )


def alternating_cell(optimizer):
    networks = pair_of_networks()
    trained = [
        optimizer(networks[0].trainable_params(), lambda shards: Decaying(shards, 0.05)),
        optimizer(networks[1].trainable_params(), lambda shards: nn.ASGD(shards, 0.05)),
    ]
    return AlternatingTrainOneStepCell(
        networks,
        trained,
        scale(),
        network_inputs=[(0, 1), (2, 3)],
        every=(1, 2),
        gradient_accumulation_steps=2,
        clip_norm=0.5,
        ema_decay=0.75,
        after_update=[Bounded(networks[0].trainable_params()), None],
    )


def rows(place, call, seed=0):
    """Returns a rank's rows of the call's batch, which overflow on some ranks."""
    rng = np.random.default_rng((seed, call))
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = rng.normal(size=(ROWS, 1)).astype(np.float32)
    if place.rank in {rank % place.ranks for rank in OVERFLOWS.get(call - seed, ())}:
        x[rows_of(*place).start, 0] = np.inf
    if place.rank in {rank % place.ranks for rank in STEEP.get(call - seed, ())}:
        y[rows_of(*place)] *= 200
    mine = rows_of(*place)
    return Tensor(x[mine]), Tensor(y[mine])


def held(cells):
    return {f"{name}/{key}": value for name, cell in cells.items() for key, value in state(cell).items()}


def both(place, plain_cell, sharded_cell, networks=1, begin=0, saves=False):
    """Yields the records of the two cells: what they hold, returned and measured."""
    cells = {"plain": plain_cell.set_train(), "sharded": sharded_cell.set_train()}
    yield held(cells)
    for call in range(begin, CALLS):
        inputs = [each for seed in range(networks) for each in rows(place, call, seed)]
        outputs = {name: cell(*inputs) for name, cell in cells.items()}
        values = held(cells)
        for name, cell in cells.items():
            values.update((f"{name}/returned {i}", each.asnumpy()) for i, each in enumerate(outputs[name]))
            values[f"{name}/counters"] = np.array(json.dumps(cell.counters()))
        yield values
        if saves and call == SAVED:
            for name, cell in cells.items():
                mindspore.save_checkpoint(cell, file_of(name, place.rank))
    for cell in cells.values():
        cell.flush()
    yield held(cells)


def file_of(name, rank, mode=None):
    """Returns the name of a checkpoint in the job's folder, of a cell after the call SAVED, within a cycle."""
    return f"{name}_{mode or mindspore.get_context('mode')}_{rank}.ckpt"


def sharded_one_network(place):
    parallel(place)
    yield from both(place, one_network_cell(plain), one_network_cell(ShardedOptimizer))


def sharded_cycle(place):
    parallel(place)
    yield from both(place, cycle_cell(plain), cycle_cell(ShardedOptimizer), saves=True)


def sharded_simultaneous(place):
    parallel(place)
    yield from both(place, simultaneous_cell(plain), simultaneous_cell(ShardedOptimizer), networks=2)


def sharded_alternating(place):
    parallel(place)
    yield from both(place, alternating_cell(plain), alternating_cell(ShardedOptimizer), networks=2)


def sharded_half(place):
    """Compares float16 weights that have masters with float32 weights that the forward rounds."""
    parallel(place)
    network, half = HalfMlp(), HalfMlp(dtype=np.float16)
    for its, rounded in zip(network.trainable_params(), half.trainable_params()):
        ops.assign(its, rounded.astype(mstype.float32))
    cells = (
        ScaledTrainOneStepCell(each, adam_in_groups(optimizer, each.trainable_params()), scale(), clip_norm=0.5)
        for each, optimizer in ((network, plain), (half, ShardedOptimizer))
    )
    yield from both(place, *cells)


def resumed(place, plain_checkpoint, sharded_checkpoint):
    cells = cycle_cell(plain), cycle_cell(ShardedOptimizer)
    for cell, checkpoint in zip(cells, (plain_checkpoint, sharded_checkpoint)):
        cell.load_state_dict(checkpoint)
    yield from both(place, *cells, begin=SAVED + 1)


def sharded_resumed(place):
    """Resumes each rank in a new process from its own part."""
    parallel(place)
    files = (file_of(name, place.rank) for name in ("plain", "sharded"))
    yield from resumed(place, *map(mindspore.load_checkpoint, files))


def sharded_merged(place):
    """Resumes any number of ranks from the merged parts of two."""
    parallel(place)
    merged = merge_shards([file_of("sharded", rank) for rank in range(2)])
    yield from resumed(place, merged, merged)


def sharded_refused(place):
    """Loads the parts of the wrong rank, in both ways; the cell keeps its state."""
    parallel(place)
    cell = cycle_cell(ShardedOptimizer).set_train()
    before = state(cell)
    other = mindspore.load_checkpoint(file_of("sharded", (place.rank + 1) % 2))
    yield {**refusal(lambda: cell.load_state_dict(other)), **untouched(before, cell)}
    mindspore.load_param_into_net(cell, other)
    yield refusal(lambda: cell(*rows(place, 0)))
    mindspore.reset_auto_parallel_context()
    network = HalfMlp()
    alone = ShardedOptimizer(network.trainable_params(), nn.Adam)
    parallel(place)
    yield refusal(lambda: ScaledTrainOneStepCell(network, alone))
    network.hidden.layerwise_parallel = True
    yield refusal(lambda: ShardedOptimizer(network.trainable_params(), nn.Adam))
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    yield refusal(lambda: ShardedOptimizer(HalfMlp().trainable_params(), nn.Adam))


def refusal(call):
    try:
        call()
    except ValueError as error:
        return {"error": np.array(str(error))}
    return {"error": np.array("")}


def untouched(before, cell):
    after = state(cell)
    return {"untouched": np.array(all(np.array_equal(before[name], after[name], equal_nan=True) for name in before))}
