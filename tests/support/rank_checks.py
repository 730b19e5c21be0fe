"""What ranks do besides training parts of a batch: they compare cells, train weights of their own, or train apart."""

import os
import signal
import warnings

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

import ms_lossscale as ls
from support import data_parallel_training as dp
from support.gan_networks import ClipWeights
from support.npu_networks import BACKWARD, FORWARD, INNOCENT, LOSS_SCALE, OnNpu, inputs_for
from support.training import state

ALONE = dp.Place(0, 1)
FURTHER = Parameter(Tensor(1.0), name="further")
# The keywords of a training cell: what the first rank passes, and the last.
SETTINGS = {
    **{"gradient_accumulation_steps": (1, 2), "clip_norm": (1.0, 2.0), "clip_value": (None, 1.0)},
    **{"ema_decay": (None, 0.9), "has_aux": (False, True), "forward_state": ((), (FURTHER,))},
    "gradient_transforms": ((), [nn.Identity()]),
    "after_update": (None, ClipWeights([FURTHER], 0.9)),
    "overflow_detector": (None, ls.FloatStatusRegister()),
    **{"max_retries": (0, 1), "weighted": (False, True), "skip_conditions": ((), [dp.HighLoss()])},
    **{"gradients_reduced": (False, True), "drop_overflowed_calls": (False, True), "name": (None, "critic")},
}
# What a keyword can't be passed without.
NEEDED = {"drop_overflowed_calls": {"gradient_accumulation_steps": 2}}


def with_network(last, change):  # A cell whose network is changed on the last rank.
    network = dp.Rows(1.0)
    if last:
        change(network)
    return ls.ScaledTrainOneStepCell(network, dp.momentum(network), dp.dynamic())


def with_optimizer(make):
    network = dp.Rows(1.0)
    return ls.ScaledTrainOneStepCell(network, make(network.trainable_params()))


def observed(condition, norm):
    condition.observe(Tensor(0.0), Tensor(norm, mstype.float32))
    return condition


def taking_turns(loss_scale=None, every=None):
    return dp.pair(ALONE, ls.AlternatingTrainOneStepCell, loss_scale or dp.dynamic(), every=every)


def restarted(cell):
    ops.assign(cell.parameters_dict()["step_counters.applied_steps"], Tensor(5, mstype.int32))
    return cell


# What else the error must name, and the cell that each rank makes, given whether it is the last.
OTHERS = {
    "cell": lambda last: dp.pair(ALONE, ls.SimultaneousTrainOneStepCell, dp.dynamic()) if last else taking_turns(),
    "every": lambda last: taking_turns(every=(1, 2 if last else 3)),
    "network_1.loss_scale": lambda last: taking_turns([2.0, 8.0 if last else 4.0]),
    "loss_scale: ": lambda last: dp.scaled(ALONE, ls.ScheduledLossScale([1, 2], [1, 2]) if last else dp.dynamic()),
    "scale_window": lambda last: dp.scaled(ALONE, ls.DynamicLossScale(scale_window=2000 if last else 1000)),
    "milestone": lambda last: dp.scaled(ALONE, ls.ScheduledLossScale([2 + last, 4], [1, 2])),
    "scale_value": lambda last: dp.scaled(ALONE, 8.0 if last else 4.0),
    "the values of weight": lambda last: with_network(last, lambda its: its.weight.set_data(its.weight * 2.0)),
    "weight 0": lambda last: with_network(last, lambda its: its.update_parameters_name("last.")),
    "optimizers": lambda last: with_optimizer(nn.SGD if last else nn.Adam),
    "learning_rate": lambda last: with_optimizer(lambda weights: nn.SGD(weights, 0.2 if last else 0.1)),
    "applied_steps": lambda last: restarted(dp.scaled(ALONE)) if last else dp.scaled(ALONE),
    "max_norm": lambda last: dp.scaled(
        ALONE, skip_conditions=[dp.HighLoss(), ls.NormSpike(max_norm=2.0 if last else 1.0)]
    ),
    "norm_spike.mean": lambda last: dp.scaled(ALONE, skip_conditions=[observed(ls.NormSpike(z_score=1.0), 1.0 + last)]),
}
DIFFERENCES = [*SETTINGS, *OTHERS, "max_loss_scale"]


def different(place):
    """Tries to train cells that differ on the last rank, and to find a loss scale in ranges that differ."""
    dp.parallel(place)
    last = place.rank == place.ranks - 1
    if last:  # What it made before is no difference.
        ls.DynamicLossScale(), nn.Dropout(p=0.5)
    equal = dp.scaled(ALONE, gradient_transforms=[nn.Dropout(p=0.5)], skip_conditions=[ls.NormSpike(max_norm=1.0)])
    yield {"equal": np.array(dp.error_of(equal.compare_ranks))}
    cell = dp.scaled(ALONE, ls.DynamicLossScale(max_loss_scale=2.0 ** (20 + last)))
    errors = {"max_loss_scale": np.array(dp.error_of(cell.find_loss_scale, *dp.rows_of(place, 0)))}
    for name in (*SETTINGS, *OTHERS):
        if name in OTHERS:
            cell = OTHERS[name](last)
        else:
            cell = dp.scaled(ALONE, **{name: SETTINGS[name][last]}, **NEEDED.get(name, {}))
        inputs = dp.rows_of(place, 0) * (1 if isinstance(cell, ls.ScaledTrainOneStepCell) else 2)
        errors[name] = np.array(dp.error_of(cell, *inputs))
    yield errors


OWN_SCALES, OWN_RATE, OWN_CLIP, OWN_MAX_NORM = (2.0**10, 2.0**12), 0.125, 0.5, 25.0
# For each call what the rows of both ranks are, for the second network: its own weights are steep, and then a spike.
OWN_CALLS = ("..", ".s", "p.", "..")


def own_weights(place):
    """Of the first network, the bias is each rank's own, and of the second all: no overflow travels by reduction."""
    dp.parallel(place, "hybrid_parallel")
    networks = [dp.Rows(place.ranks / 8, prefix) for prefix in ("a.", "bb.")]
    for own in (networks[0].bias, *networks[1].trainable_params()):
        own.layerwise_parallel = True
    optimizers = [nn.SGD(network.trainable_params(), OWN_RATE) for network in networks]
    keywords = {"clip_norm": OWN_CLIP, "skip_conditions": [ls.NormSpike(max_norm=OWN_MAX_NORM)]}
    scales, keywords["network_inputs"] = list(map(ls.DynamicLossScale, OWN_SCALES)), [(0, 1, 2), (3, 4, 5)]
    cell = ls.SimultaneousTrainOneStepCell(networks, optimizers, scales, **keywords).set_train()
    yield state(cell)
    for call, kinds in enumerate(OWN_CALLS):
        overflow = cell(*dp.rows_of(place, call), *dp.rows_of(place, call, kinds, place.ranks))[1]
        scales, norms = np.array(cell.get_loss_scale()), np.array(cell.grad_norm())
        yield {**state(cell), "overflow": overflow.asnumpy(), "scales": scales, "norms": norms}


def saturating(place):
    """Overflows in the second call in the forward on the last rank, and in the third in the backward on the first."""
    dp.parallel(place)
    with ls.emulation.saturation_mode() as register:
        network = OnNpu("network")
        # An innocent step takes 0.5 from the weight, which is 1.
        optimizer = nn.SGD(network.trainable_params(), learning_rate=0.25)
        cell = ls.ScaledTrainOneStepCell(
            network, optimizer, ls.DynamicLossScale(LOSS_SCALE, scale_window=100)
        ).set_train()
        for last, first in ((INNOCENT, INNOCENT), (FORWARD, INNOCENT), (INNOCENT, BACKWARD), (INNOCENT, INNOCENT)):
            _, overflow, scale = cell(*inputs_for({place.ranks - 1: last, 0: first}.get(place.rank, INNOCENT)))
            raised = np.bool_("get 1" in register.events)
            register.events.clear()
            values = {"overflow": overflow.asnumpy(), "loss_scale": scale.asnumpy(), "raised": raised}
            yield {**values, "weight": network.weight.asnumpy().copy()}


class Product(nn.Cell):  # A loss in which the gradient of the weight is x.
    def __init__(self, dtype):
        super().__init__()
        self.weight = Parameter(Tensor([1.0], dtype), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


def large_gradients(place):
    """Has gradients that are finite on each rank, but not in sum: in float32, and in the dtype of a float16 weight."""
    for dtype, gradient, mean in ((mstype.float32, 3e38, True), (mstype.float16, 40000.0, False)):
        dp.parallel(place, mean=mean)
        network = Product(dtype)
        optimizer = nn.SGD(network.trainable_params(), 2.0**-10)
        cell = ls.ScaledTrainOneStepCell(network, optimizer, ls.FixedLossScale(1.0)).set_train()
        overflow = cell(Tensor([gradient], dtype))[1].asnumpy()
        yield {"overflow": overflow, "weight": network.weight.asnumpy().copy()}


def apart(place):  # The mode is stand_alone. In the second call the last rank overflows.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dp.hooked(place)
        cell = dp.scaled(ALONE).set_train()
    yield {"warnings": np.array([str(each.message) for each in warned if "ranks" in str(each.message)])}
    for call, kinds in enumerate(("..", ".x")):
        yield {"overflow": cell(*dp.rows_of(place, call, kinds, place.ranks))[1].asnumpy()}


def split_weights(place):
    """Constructs cells in the modes that split weights, which MindSpore runs on GPU and Ascend only."""
    for mode in ("semi_auto_parallel", "auto_parallel"):
        mindspore.set_auto_parallel_context(parallel_mode=mode)
        of_cell = {"clip_value": 1.0}, {"gradient_accumulation_steps": 2}, {"ema_decay": 0.9}, {"weighted": True}
        errors = {next(iter(its)): np.array(dp.error_of(dp.scaled, ALONE, **its)) for its in of_cell}
        mindspore.set_auto_parallel_context(pipeline_stages=2)
        errors["pipeline_stages"] = np.array(dp.error_of(dp.scaled, ALONE))
        mindspore.reset_auto_parallel_context()
        yield {"mode": np.array(mode), **errors}


def killed(place):  # Kills the last rank after its first step.
    cell = dp.scaled(place).set_train()
    for call in range(3):
        cell(*dp.rows_of(place, call))
        if place.rank == place.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    yield {}
