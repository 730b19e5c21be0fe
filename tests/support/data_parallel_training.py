"""What the ranks of a job train for `test_data_parallel.py`, and the control in a single process."""

from typing import NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    FixedLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    emulation,
)
from support.networks import FEATURES, LinearWithBias, LossOfShape, Mlp
from support.npu_networks import BACKWARD, FORWARD, INNOCENT, LOSS_SCALE, OnNpu, inputs_for
from support.training import state

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}
ROWS = 8
STEPS = 6
CLIP_NORM = 0.5
# The calls in which a rank's batch overflows: -1 is the last rank.
PLAN = {1: (-1,), 3: (0,), 4: (0, -1)}
# With two calls in a cycle: the first call of one, the last call of the next.
CYCLE_PLAN = {2: (-1,), 5: (0,)}
CYCLE_CALLS = 9


class Place(NamedTuple):
    """One rank's place in its job. `Place(0, 1)` is alone and sees the whole batches."""

    rank: int
    ranks: int


def parallel(place, mode="data_parallel", mean=True):
    """Makes cells that are constructed next train with the other ranks, if there are any."""
    if place.ranks > 1:
        mindspore.set_auto_parallel_context(parallel_mode=mode, gradients_mean=mean)


def rows_of(rank, ranks):
    return slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)


def whole_batch(call, seed=0):
    rng = np.random.default_rng((seed, call))
    return rng.normal(size=(ROWS, FEATURES)).astype(np.float32), rng.normal(size=(ROWS, 1)).astype(np.float32)


def batch(place, call, plan, jobs_ranks=None, seed=0):
    """Returns a rank's rows of the call's batch. The control passes the number of ranks that the plan is for."""
    ranks = jobs_ranks or place.ranks
    x, y = whole_batch(call, seed)
    for rank in plan.get(call, ()):
        x[rows_of(rank % ranks, ranks).start, 0] = np.inf
    mine = rows_of(*place)
    return Tensor(x[mine]), Tensor(y[mine])


class Observed(nn.Cell):
    """
    An Mlp beside a BatchNorm whose statistics each forward moves. The loss does not depend on them, since those of half
    a batch differ from those of the whole.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.model = Mlp()

    def construct(self, x, y):
        return ops.depend(self.model(x, y), self.norm(x))


class Product(nn.Cell):
    """A loss in which the gradient of the weight is x."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0], mindspore.float32), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


def momentum(network):
    return nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)


def dynamic():
    return DynamicLossScale(2.0**10, scale_window=2)


def scaled(network, loss_scale=None, **keywords):
    return ScaledTrainOneStepCell(network, momentum(network), loss_scale or dynamic(), **keywords).set_train()


def pair(cell_class, **keywords):
    """Returns a cell for two networks, each with its own inputs."""
    networks = [Mlp(seed=0), Mlp(seed=10)]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    cell = cell_class(
        networks,
        [momentum(network) for network in networks],
        dynamic(),
        network_inputs=[(0, 1), (2, 3)],
        clip_norm=CLIP_NORM,
        ema_decay=0.5,
        **keywords,
    )
    return cell.set_train()


def pair_of_batches(place, call, plan, jobs_ranks):
    """Returns batches in which only the second network overflows."""
    return (*batch(place, call, {}, jobs_ranks, seed=1), *batch(place, call, plan, jobs_ranks, seed=2))


def records(cell, calls):
    """Yields what the cell holds before the first call, and what it holds and returned after each."""
    yield state(cell)
    for inputs in calls:
        yield record(cell, cell(*inputs))


def record(cell, outputs):
    values = {name: tensor.asnumpy() for name, tensor in zip(("overflow", "loss_scale"), outputs[1:3])}
    return {**state(cell), **values}


class Counting(ScaledTrainOneStepCell):
    """Counts how often it compares itself with the cells of the other ranks."""

    comparisons = 0

    def compare_ranks(self):
        self.comparisons += 1
        super().compare_ranks()


def one_network(place, ranks=None):
    parallel(place)
    network = Observed()
    cell = Counting(network, momentum(network), dynamic(), clip_norm=CLIP_NORM, ema_decay=0.5).set_train()
    for values in records(cell, (batch(place, call, PLAN, ranks) for call in range(STEPS))):
        yield {**values, "grad_norm": np.float64(cell.grad_norm()), "comparisons": np.int64(cell.comparisons)}


def summed(place, ranks=None):
    parallel(place, mean=False)
    cell = scaled(LossOfShape(()), clip_value=2.0)
    yield from records(cell, (batch(place, call, PLAN, ranks) for call in range(STEPS)))


def cycle(place, ranks=None):
    parallel(place)
    cell = scaled(Observed(), gradient_accumulation_steps=2, clip_norm=CLIP_NORM, ema_decay=0.5)
    yield from records(cell, (batch(place, call, CYCLE_PLAN, ranks) for call in range(CYCLE_CALLS)))
    cell.flush()
    yield state(cell)


def simultaneous(place, ranks=None):
    parallel(place)
    cell = pair(SimultaneousTrainOneStepCell)
    yield from records(cell, (pair_of_batches(place, call, PLAN, ranks) for call in range(STEPS)))


def alternating(place, ranks=None):
    parallel(place)
    cell = pair(AlternatingTrainOneStepCell, every=(1, 2), gradient_accumulation_steps=2)
    yield from records(cell, (pair_of_batches(place, call, CYCLE_PLAN, ranks) for call in range(CYCLE_CALLS)))


def on_npu(place, **keywords):
    """Returns the cell, and a function that makes its inputs from what the last, the first and the other ranks do."""
    network = OnNpu("network")
    # An innocent step takes 0.5 from the weight, which is 1.
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.25)
    loss_scale = DynamicLossScale(LOSS_SCALE, scale_window=100)
    cell = ScaledTrainOneStepCell(network, optimizer, loss_scale, **keywords).set_train()

    def inputs(last=INNOCENT, first=INNOCENT):
        return inputs_for({place.ranks - 1: last, 0: first}.get(place.rank, INNOCENT))

    return cell, inputs


def saturating(place):
    """Overflows in the second call in the forward on the last rank, and in the third in the backward on the first."""
    parallel(place)
    with emulation.saturation_mode() as register:
        cell, inputs = on_npu(place)
        for values in records(cell, (inputs(), inputs(last=FORWARD), inputs(first=BACKWARD), inputs())):
            yield {**values, "raised": np.bool_("get 1" in register.events)}
            register.events.clear()


def own_weights(place):
    """Trains weights of which each rank has its own: their gradients are not reduced, so no inf travels."""
    parallel(place, "hybrid_parallel")
    network = Mlp()
    for weight in network.trainable_params():
        weight.layerwise_parallel = True
    yield from records(scaled(network), (batch(place, call, PLAN) for call in range(STEPS)))


def own_weights_alone(place):
    """Trains a rank's own weights as they should become: only in the steps in which no rank overflowed."""
    yield from records(scaled(Mlp()), (batch(place, call, {}) for call in range(STEPS) if call not in PLAN))


def partly_own_weights(place):
    parallel(place, "hybrid_parallel")
    network = LinearWithBias()
    network.bias.layerwise_parallel = True
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)
    cell = ScaledTrainOneStepCell(network, optimizer, dynamic(), clip_norm=CLIP_NORM).set_train()
    for values in records(cell, [batch(place, 0, {})]):
        yield {**values, "grad_norm": np.float64(cell.grad_norm())}


def alone(place):
    """Initialises communication, but each rank trains for itself."""
    yield from records(scaled(Mlp(), clip_norm=CLIP_NORM), (batch(place, call, PLAN) for call in range(STEPS)))


def large_gradients(place):
    """Has gradients that are finite on each rank, but not in sum."""
    parallel(place)
    yield from records(scaled(Product(), FixedLossScale(1.0)), [[Tensor([3e38], mindspore.float32)]])


def unchecked(place, ranks=None):
    parallel(place)
    cell = scaled(Mlp(), FixedLossScale(2.0**10, drop_overflow_update=False))
    yield from records(cell, (batch(place, call, {}, ranks) for call in range(2)))


def run(scenario, mode, *arguments):
    """Returns the records of a scenario, dicts, in the given mode. Restores the mode."""
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=MODES[mode])
    try:
        return list(scenario(*arguments))
    finally:
        mindspore.reset_auto_parallel_context()
        mindspore.set_context(mode=before)
