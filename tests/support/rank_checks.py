"""What the ranks of a job do besides plain training: compare cells, retry, move several scales, shard weights."""

import os
import signal
import warnings

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ManualStep,
    NormSpike,
    ScaledTrainOneStepCell,
    ScheduledLossScale,
    SimultaneousTrainOneStepCell,
)
from ms_lossscale.step.ranks import Ranks
from ms_lossscale.step.step import Check
from support.data_parallel_training import batch, dynamic, pair, parallel, record, scaled
from support.networks import FEATURES, Linear, Mlp
from support.retried_networks import LEARNING_RATE, Slope


def renamed(network, prefix):
    network.update_parameters_name(prefix)
    return network


def restarted(cell):
    ops.assign(cell.step_counters.applied_steps, Tensor(5, mindspore.int32))
    return cell


# What the error must name, and the cell that each rank makes, given whether it is the last.
DIFFERENCES = {
    "clip_norm": lambda last: scaled(Mlp(), clip_norm=2.0 if last else 1.0),
    "ema_decay": lambda last: scaled(Mlp(), ema_decay=0.9 if last else None),
    "gradient_accumulation_steps": lambda last: scaled(Mlp(), gradient_accumulation_steps=2 if last else 1),
    "loss_scale.class": lambda last: scaled(Mlp(), ScheduledLossScale([1, 2], [1, 2]) if last else dynamic()),
    "loss_scale.scale_window": lambda last: scaled(Mlp(), DynamicLossScale(scale_window=2000 if last else 1000)),
    "loss_scale.milestone": lambda last: scaled(Mlp(), ScheduledLossScale([3 if last else 2, 4], [1, 2])),
    "loss_scale.scale_value": lambda last: scaled(Mlp(), 8.0 if last else 4.0),
    "the values of hidden.weight": lambda last: scaled(Mlp(seed=int(last))),
    "weight 0": lambda last: scaled(renamed(Mlp(), "last." if last else "")),
    "optimizers": lambda last: ScaledTrainOneStepCell(
        network := Mlp(), (nn.SGD if last else nn.Adam)(network.trainable_params())
    ),
    "learning_rate": lambda last: ScaledTrainOneStepCell(
        network := Mlp(), nn.SGD(network.trainable_params(), 0.2 if last else 0.1)
    ),
    "step_counters.applied_steps": lambda last: restarted(scaled(Mlp())) if last else scaled(Mlp()),
    "cell": lambda last: pair(SimultaneousTrainOneStepCell if last else AlternatingTrainOneStepCell),
    "network_1.loss_scale.scale_value": lambda last: alternating_with_scale(8.0 if last else 4.0),
    "skip_conditions": lambda last: scaled(Mlp(), skip_conditions=[NormSpike(1.0)] * last),
    "skip_conditions[0].max_norm": lambda last: spiking(NormSpike(2.0 if last else 1.0)),
    "skip_conditions[1].z_score": lambda last: spiking(NormSpike(1.0), NormSpike(z_score=2.0 if last else 1.0)),
    "skip_conditions[0].window": lambda last: spiking(NormSpike(z_score=1.0, window=20 if last else 10)),
    "norm_spike.mean": lambda last: spiking(observed(NormSpike(z_score=1.0), 2.0 if last else 1.0)),
    "alternation.every": lambda last: pair(AlternatingTrainOneStepCell, every=(1, 2 if last else 3)),
}


def spiking(*conditions):
    return scaled(Mlp(), skip_conditions=conditions)


def observed(condition, norm):
    condition.observe(Tensor(0.0), Tensor(norm, mindspore.float32))
    return condition


def alternating_with_scale(value):
    cell = pair(AlternatingTrainOneStepCell)
    cell.set_loss_scale([2.0, value])
    return cell


def different(place):
    """Tries to train cells that differ on the last rank."""
    parallel(place)
    errors = {}
    for name, make_cell in DIFFERENCES.items():
        cell = make_cell(place.rank == place.ranks - 1)
        inputs = batch(place, 0, {}) * (1 if isinstance(cell, ScaledTrainOneStepCell) else 2)
        try:
            cell(*inputs)
        except ValueError as error:
            errors[name] = np.array(str(error))
    yield errors


def killed(place):
    """Kills the last rank after its first step."""
    parallel(place)
    cell = scaled(Mlp())
    for call in range(3):
        cell(*batch(place, call, {}))
        if place.rank == place.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    yield {}


# For each call the slopes of both ranks. The first overflows above 2**15 on rank 0 and above 2**12 on rank 1, then the
# other way round; then one is not a number.
RETRIED_SLOPES = ((1.0, 8.0), (16.0, 1.0), (1.0, float("nan")), (1.0, 1.0))
# For each call the slopes of both networks on both ranks: none overflows, the first on rank 0, the second on rank 1,
# each on one, and one is not a number.
OWN_SLOPES = (((1, 1), (1, 1)), ((4, 1), (1, 1)), ((1, 1), (1, 8)), ((8, 1), (1, 16)), ((1, 1), (1, float("nan"))))
ONES = np.ones((4, 3), np.float32)


def retried(place, steps=1):
    parallel(place)
    network = Slope()
    cell = ScaledTrainOneStepCell(
        network,
        nn.SGD([network.weight], LEARNING_RATE),
        DynamicLossScale(2.0**15),
        max_retries=4,
        gradient_accumulation_steps=steps,
    ).set_train()
    for slopes in RETRIED_SLOPES:
        for _ in range(steps):
            outputs = cell(Tensor(ONES), Tensor(np.float32(slopes[place.rank])))
        yield {**record(cell, outputs), "counters": np.array(list(cell.counters().values()))}


def retried_cycle(place):
    yield from retried(place, steps=2)


def own_scales(place, retries=0):
    parallel(place)
    networks = [Slope("first"), Slope("second")]
    # The weights of the second are each rank's own, so that nobody else sees their gradients.
    networks[1].weight.layerwise_parallel = True
    cell = SimultaneousTrainOneStepCell(
        networks,
        [nn.SGD([network.weight], LEARNING_RATE) for network in networks],
        [DynamicLossScale(2.0**15), DynamicLossScale(2.0**14)],
        network_inputs=[(0, 1), (0, 2)],
        max_retries=retries,
    ).set_train()
    for slopes in OWN_SLOPES:
        outputs = cell(Tensor(ONES), *(Tensor(np.float32(slope)) for slope in slopes[place.rank]))
        yield {**record(cell, outputs), "scales": np.array(cell.get_loss_scale())}


def own_scales_retried(place):
    yield from own_scales(place, retries=4)


def found(place):
    """Each rank has a batch of its own; then one has one that no scale mends."""
    parallel(place)
    for steps in (1, 2):
        networks = [Slope("first"), Slope("second")]
        # As above.
        networks[1].weight.layerwise_parallel = True
        cell = SimultaneousTrainOneStepCell(
            networks,
            [nn.SGD([network.weight], LEARNING_RATE) for network in networks],
            [DynamicLossScale(), DynamicLossScale()],
            network_inputs=[(0, 1), (0, 2)],
            gradient_accumulation_steps=steps,
        ).set_train()
        scales = cell.find_loss_scale(Tensor(ONES), *map(Tensor, np.float32([(5, 1), (1, 40)][place.rank])))
        try:
            cell.find_loss_scale(Tensor(ONES), *map(Tensor, np.float32([(1, 1), (1, float("nan"))][place.rank])))
        except RuntimeError as error:
            yield {"found": np.array(scales), "error": np.array(str(error)), "scales": np.array(cell.get_loss_scale())}
    # With ranges that differ, one would try a scale that the others do not.
    cell = scaled(Mlp(), DynamicLossScale(max_loss_scale=2.0 ** (20 + place.rank)))
    try:
        cell.find_loss_scale(*batch(place, 0, {}))
    except ValueError as error:
        yield {"error": np.array(str(error))}


class SeenBySide(nn.Cell):
    """An Mlp beside a BatchNorm of another input, which shows in no gradient."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.norm = nn.BatchNorm1d(FEATURES)
        # In graph mode, their gradients would show it.
        for weight in self.norm.trainable_params():
            weight.requires_grad = False
        self.model = Mlp()

    def construct(self, x, y, seen):
        return ops.depend(self.model(x, y), self.norm(seen))


def reduced_by_hooks(place):
    """The mode is stand_alone, and hooks reduce the gradients. In the second of three calls one rank overflows."""
    all_reduce, share = ops.AllReduce(), 1.0 / place.ranks

    def averaged(grad):
        return all_reduce(grad) * share

    for keywords in ({"gradients_reduced": True}, {}):
        network = SeenBySide()
        for weight in network.trainable_params():
            weight.register_hook(averaged)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            cell = scaled(network, **keywords)
        messages = [str(each.message) for each in warned]
        for call in range(3):
            x, y = batch(place, call, {})
            seen = x.asnumpy().copy()
            if call == 1 and place.rank == 1:
                seen[0, 0] = np.inf
            outputs = cell(x, y, Tensor(seen))
            yield {**record(cell, outputs), "warnings": np.array("".join(messages))}


def sharding_cells(**keywords):
    """Yields a cell for one network and one for two, whose weights MindSpore would shard."""
    networks = [renamed(Linear(), f"{i}.") for i in range(2)]
    optimizers = [nn.Momentum(network.trainable_params(), 0.1, 0.9) for network in networks]
    yield ScaledTrainOneStepCell(networks[0], optimizers[0], dynamic(), **keywords)
    yield AlternatingTrainOneStepCell(networks, optimizers, dynamic(), **keywords)


def sharded(place, mode):
    """Constructs cells without running them: MindSpore runs the modes that shard weights only on GPU and Ascend."""
    mindspore.set_auto_parallel_context(parallel_mode=mode)
    # In PyNative mode, what compiles the end of a step is around it.
    parts = [part for cell in sharding_cells() for step in cell.steps for _, part in step.end.cells_and_names()]
    checks = [part for part in parts if isinstance(part, Check)]
    agrees = [isinstance(check.ranks, Ranks) and check.before_check[0] is check.ranks.grad_reducer for check in checks]
    yield {"agrees": np.array(agrees)}
    refused = {}
    further = {"gradient_accumulation_steps": 2, "ema_decay": 0.9, "weighted": True, "pipeline_stages": 2}
    for name, value in further.items():
        keywords = {name: value}
        if name == "pipeline_stages":
            mindspore.set_auto_parallel_context(**keywords)
            keywords = {}
        try:
            next(sharding_cells(**keywords))
        except ValueError as error:
            refused[name] = np.array(str(error))
    mindspore.reset_auto_parallel_context()
    yield refused
    yield {"weights": np.array(refused_weights(mode))}


def refused_weights(mode):
    """Returns the messages of a ManualStep that gets a weight eagerly, and in a compiled function."""
    network = Linear()
    mindspore.set_auto_parallel_context(parallel_mode=mode)
    step = ManualStep(network, nn.SGD(network.trainable_params()), dynamic())
    # On CPU, nothing runs in this mode.
    mindspore.reset_auto_parallel_context()
    grads = (Tensor(np.zeros((FEATURES, 1), np.float32)),)

    @mindspore.jit
    def compiled(x):
        step.begin(x)
        return step.end(grads, weight=x)

    def eagerly(x):
        step.begin(x)
        return step.end(grads, weight=x)

    messages = []
    for make_step in (eagerly, compiled):
        try:
            make_step(Tensor(2.0))
        except ValueError as error:
            messages.append(str(error))
    return messages


def semi_auto_parallel(place):
    yield from sharded(place, "semi_auto_parallel")


def auto_parallel(place):
    yield from sharded(place, "auto_parallel")
