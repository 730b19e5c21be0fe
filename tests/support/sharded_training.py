"""What the ranks of a job train for `test_sharded_optimizer.py`: two cells that differ only in that the ranks share the
state of one cell's optimizers. Both get the same calls, and after each a record holds the state of both."""

import json

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.experimental import optim

import ms_lossscale as ls
from support.data_parallel_training import ROWS, Rows, error_of, parallel, rows_of
from support.gan_networks import ClipWeights
from support.held_cells import Holder
from support.networks import FEATURES, weight
from support.training import cell_of, state

# The rows of each call, see `rows_of`.
CALLS = (*("..", ".s", "..", "x.", "..", "..", "..", "..", ".x", "xx", "..", "..", "h."), *[".."] * 7)
SAVED = 12
NAMES = ("plain", "sharded")


class HalfMlp(nn.Cell):
    """Mean squared error of two layers that compute in float16. The weights have 15, 5, 5 and 1 elements, which two or
    four ranks can't share evenly, and there is a single number. BatchNorm's statistics are each rank's own."""

    def __init__(self, seed=0, dtype=np.float32, prefix=""):
        super().__init__()
        self.hidden = weight(FEATURES, 5, seed=seed, name=f"{prefix}hidden.weight", dtype=dtype)
        self.hidden_bias = weight(5, seed=seed + 1, name=f"{prefix}hidden.beta", dtype=dtype)
        self.output = weight(5, 1, seed=seed + 2, name=f"{prefix}output.weight", dtype=dtype)
        self.output_bias = weight(1, seed=seed + 3, name=f"{prefix}output.bias", dtype=dtype)
        self.factor = Parameter(Tensor(1.0, mstype.float32), name=f"{prefix}factor")
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.norm.update_parameters_name(prefix)

    def construct(self, x, y, valid):
        half = mstype.float16
        hidden = ops.matmul(x.astype(half), self.hidden.astype(half)) + self.hidden_bias.astype(half)
        output = ops.matmul(ops.tanh(hidden), self.output.astype(half)) + self.output_bias.astype(half)
        errors = output.astype(mstype.float32).reshape((-1,)) * self.factor - y
        return ops.depend((ops.square(errors) * valid).mean(), self.norm(x))


class Decaying(nn.Optimizer):  # A user's own optimizer: sign descent with momentum.
    def __init__(self, params, learning_rate):
        super().__init__(learning_rate, params)
        self.momentum = self.parameters.clone(prefix="own", init="zeros")
        self.share = Tensor(0.25, mstype.float32)

    def construct(self, gradients):
        rate, done = self.get_lr(), ()
        for i, gradient in enumerate(gradients):
            moved = self.momentum[i] + self.share * (ops.sign(gradient) - self.momentum[i])
            ops.assign(self.momentum[i], moved)
            done += (ops.assign_sub(self.parameters[i], rate * moved),)
        return done


def plain(parameters, make):
    return make(parameters)


def scale():
    return ls.DynamicLossScale(2.0**12, scale_window=3)


def adam_in_groups(optimizer, weights):  # An optimizer with weight decay and scheduled learning rates by group.
    groups = [
        {"params": weights[1::2], "lr": nn.ExponentialDecayLR(0.05, 0.5, 8)},
        {"params": weights[::2], "weight_decay": 0.1, "lr": nn.CosineDecayLR(0.001, 0.02, 12)},
        {"order_params": weights},
    ]
    return optimizer(groups, lambda shards: nn.AdamWeightDecay(shards, 0.01))


def one_network_cell(optimizer):
    network = HalfMlp()
    trained = adam_in_groups(optimizer, network.trainable_params())
    spikes = [ls.NormSpike(max_norm=100.0, z_score=1.0, window=4)]
    return ls.ScaledTrainOneStepCell(network, trained, scale(), clip_norm=0.5, ema_decay=0.75, skip_conditions=spikes)


def cycle_cell(optimizer):  # A cell with cycles of three calls; the 20 calls end within a cycle.
    network = HalfMlp()
    weights = network.trainable_params()
    groups = [{"params": weights[:2], "weight_decay": 0.1, "lr": 0.05}, {"params": weights[2:]}]
    trained = optimizer(groups, lambda shards: optim.AdamW(shards, 0.02))
    return ls.ScaledTrainOneStepCell(
        network, trained, scale(), gradient_accumulation_steps=3, max_retries=3, clip_norm=0.5, ema_decay=0.75
    )


def alternating_cell(optimizer):
    networks = [HalfMlp(seed, prefix=f"{seed}.") for seed in range(2)]
    trained = [
        optimizer(networks[0].trainable_params(), lambda shards: Decaying(shards, 0.05)),
        optimizer(networks[1].trainable_params(), lambda shards: nn.ASGD(shards, 0.05)),
    ]
    keywords = {"network_inputs": [(0, 1, 2), (3, 4, 5)], "every": (1, 2), "gradient_accumulation_steps": 2}
    keywords.update(
        clip_norm=0.5, ema_decay=0.75, after_update=[ClipWeights(networks[0].trainable_params(), 0.9), None]
    )
    return ls.AlternatingTrainOneStepCell(networks, trained, scale(), **keywords)


def half_cell(optimizer):
    """The plain optimizer trains float32 weights that the forward rounds, the sharded one float16 weights."""
    network = half = HalfMlp(dtype=np.float16)
    if optimizer is plain:
        network = HalfMlp()
        for its, rounded in zip(network.trainable_params(), half.trainable_params()):
            ops.assign(its, rounded.astype(mstype.float32))
    return ls.ScaledTrainOneStepCell(
        network, adam_in_groups(optimizer, network.trainable_params()), scale(), clip_norm=0.5
    )


def both(place, make, networks=1, saves=False, loads=None):
    """Yields in turns what the cell with the plain optimizer holds and returned, and what that with the sharded one
    does: from the beginning, or from what they load."""
    parallel(place)
    cells = [make(optimizer).set_train() for optimizer in (plain, ls.ShardedOptimizer)]
    for cell, checkpoint in zip(cells, loads or ()):
        cell.load_state_dict(checkpoint)

    def records(outputs=((), ())):
        for cell, its in zip(cells, outputs):
            returned = {f"returned {i}": each.asnumpy() for i, each in enumerate(its)}
            yield {**state(cell), **returned, "counters": np.array(json.dumps(cell.counters()))}

    yield from records()
    for call in range(SAVED + 1 if loads else 0, len(CALLS)):
        # Those of a second network come a call later.
        inputs = [each for i in range(networks) for each in rows_of(place, call, CALLS[call - i], place.ranks)]
        yield from records([cell(*inputs) for cell in cells])
        if saves and call == SAVED:
            for name, cell in zip(NAMES, cells):
                mindspore.save_checkpoint(cell, file_of(name, place.rank))
    for cell in cells:
        cell.flush()
    yield from records()


def file_of(name, rank):
    """Returns the name of a checkpoint beside the job's folder, of a cell after the call SAVED, within a cycle."""
    return f"../{name}_{mindspore.get_context('mode')}_{rank}.ckpt"


def sharded_one_network(place):
    return both(place, one_network_cell)


def sharded_cycle(place):
    return both(place, cycle_cell, saves=True)


def sharded_alternating(place):
    return both(place, alternating_cell, networks=2)


def sharded_half(place):
    return both(place, half_cell)


def sharded_resumed(place):  # Resumes each rank in a new process from its own part.
    files = (file_of(name, place.rank) for name in NAMES)
    return both(place, cycle_cell, loads=list(map(mindspore.load_checkpoint, files)))


def sharded_merged(place):  # Resumes any number of ranks from the merged parts of two.
    return both(place, cycle_cell, loads=[ls.merge_shards([file_of("sharded", rank) for rank in range(2)])] * 2)


class Around(nn.Cell):  # Renames the weights once their optimizer is made.
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def construct(self, x, y, valid):
        return self.rows(x, y, valid)


def _rows_cell(kind, keywords, optimizer=ls.ShardedOptimizer):
    """Returns a ManualStep or a training cell with cycles of three calls, and what calls it."""
    network = Rows(None if keywords.get("weighted") else 1 / ROWS)
    trained = optimizer(network.trainable_params(), lambda shards: nn.Momentum(shards, 0.05, 0.5))
    if kind == "held scaled":
        network = Around(network)
    made = cell_of(kind.split()[-1], [network], [trained], scale(), gradient_accumulation_steps=3, **keywords)
    if kind == "held scaled":
        Holder(made)
    if kind != "manual":
        return made, made
    value_and_grad = made.value_and_grad(network)

    def call(x, y, valid):
        x, y, valid = made.begin(x, y, valid)
        return made.end(value_and_grad(x, y, valid)[1], weight=valid.sum())

    return made, call


def sharded_shares(place):
    """Yields in turns what cells hold at the end of a cycle of which each rank has a share of its own, of weights or of
    calls that were not dropped: cells that went on, and others that loaded what was merged before the last call."""
    parallel(place)
    of_each = [("scaled", {"weighted": True}), ("scaled", {"drop_overflowed_calls": True}), ("manual", {})]
    for number, (kind, keywords) in enumerate([*of_each, ("held scaled", {"weighted": True, "name": "critic"})]):
        file = "../shares_{}_{}_{}.ckpt".format(mindspore.get_context("mode"), number, "{}")
        (cell, call), (other, call_other) = (_rows_cell(kind, keywords) for _ in range(2))
        for i, kinds in enumerate(("..", ".x" if "drop_overflowed_calls" in keywords else "..")):
            call(*rows_of(place, i, kinds, place.ranks))
        mindspore.save_checkpoint(cell, file.format(place.rank))
        ops.AllReduce()(Tensor(1.0)).asnumpy()  # All have saved.
        merged = ls.merge_shards([file.format(rank) for rank in range(place.ranks)])
        assert merged.keys() == state(_rows_cell(kind, keywords, plain)[0]).keys()
        assert other.load_state_dict(merged) == ([], [])
        before = state(cell)
        for each in (call, call_other):
            each(*rows_of(place, 2))
        yield from (before, state(cell), state(other))


def sharded_refused(place):
    """Loads the parts of the wrong rank, in both ways, the first of which keeps the cell's state."""
    parallel(place)
    cell = cycle_cell(ls.ShardedOptimizer).set_train()
    other = mindspore.load_checkpoint(file_of("sharded", (place.rank + 1) % 2))
    yield state(cell)
    errors = [error_of(cell.load_state_dict, other)]
    yield state(cell)
    mindspore.load_param_into_net(cell, other)
    errors.append(error_of(cell, *rows_of(place, 0)))
    mindspore.reset_auto_parallel_context()
    network = HalfMlp()
    alone = ls.ShardedOptimizer(network.trainable_params(), nn.Adam)
    parallel(place)
    errors.append(error_of(ls.ScaledTrainOneStepCell, network, alone))
    network.hidden.layerwise_parallel = True
    errors.append(error_of(ls.ShardedOptimizer, network.trainable_params(), nn.Adam))
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    errors.append(error_of(ls.ShardedOptimizer, HalfMlp().trainable_params(), nn.Adam))
    yield {"errors": np.array(errors)}
