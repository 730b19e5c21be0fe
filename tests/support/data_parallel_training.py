"""What ranks train on parts of a batch, and one process alone on the whole. Each training is a cell, or a ManualStep,
and the same calls for it; its records are what it holds after each."""

import contextlib
import json
from typing import NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm

import ms_lossscale as ls
import support.in_mode
from support.gan_networks import ClipWeights
from support.networks import FEATURES, weight
from support.training import state

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}
ROWS = 8
HIGHEST = 300.0
PATIENT = {"backoff_if_loss_not_finite": False}


class Place(NamedTuple):  # One rank's place in its job. `Place(0, 1)` is alone and sees the whole batches.
    rank: int
    ranks: int

    def rows(self):
        return slice(self.rank * ROWS // self.ranks, (self.rank + 1) * ROWS // self.ranks)


def parallel(place, mode="data_parallel", mean=True):
    """Makes cells that are constructed next train with the other ranks, if there are any."""
    if place.ranks > 1:
        mindspore.set_auto_parallel_context(parallel_mode=mode, gradients_mean=mean)


class Rows(nn.Cell):
    """The sum of squared errors over rows, which it computes in float16: times `factor`, or with the number of valid
    rows as its weight. The statistics of a BatchNorm, on which the loss does not depend, are each rank's own."""

    def __init__(self, factor, prefix=""):
        super().__init__(auto_prefix=False)
        self.weight = weight(FEATURES, seed=len(prefix), name=f"{prefix}weight")
        self.bias, self.norm = weight(1, seed=1, name=f"{prefix}bias"), nn.BatchNorm1d(FEATURES, affine=False)
        self.norm.update_parameters_name(prefix)
        self.factor = factor

    def construct(self, x, y, valid):
        # The gradients of rows are float16, and their sum is float32: one process rounds as several do.
        weights = (self.weight + ops.zeros_like(x)).astype(mstype.float16)
        outputs = (weights * x.astype(mstype.float16)).astype(mstype.float32).sum(-1)
        loss = ops.depend((ops.square(outputs + self.bias - y) * valid).sum(), self.norm(x))
        if self.factor is None:
            return loss, valid.sum()
        return loss * self.factor


def rows_of(place, call, kinds=".", ranks=1):
    """Returns a rank's rows of the call's batch. `kinds` says what the first row of the first and of the last of so
    many `ranks` is: "x" overflows at any scale, and "s" above some scale; "n" has a loss that is NaN; "h" has a high
    loss; "p" and "m" have large gradients in opposite directions; "0" stands for a rank without valid rows."""
    rng = np.random.default_rng(call)
    x, y = rng.normal(size=(ROWS, FEATURES)).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)
    valid = (rng.random(ROWS) < 0.7).astype(np.float32)
    for rank, kind in {0: kinds[0], ranks - 1: kinds[-1]}.items():
        rows = Place(rank, ranks).rows()
        first = rows.start
        if kind == "0":
            valid[rows] = 0.0
        elif kind != ".":
            valid[first] = 1.0
            x[first] = np.inf if kind == "x" else 1.0
            y[first] = {"x": 0.0, "s": 64.0, "n": np.nan, "h": 100.0, "p": 30.0, "m": -30.0}[kind]
    return tuple(Tensor(each[place.rows()]) for each in (x, y, valid))


class HighLoss(ls.SkipCondition):  # Asks to skip where the loss is high, and counts what it observed.
    def __init__(self):
        super().__init__()
        self.highest, self.one = Tensor(HIGHEST), Tensor(1.0)
        self.observed = Parameter(Tensor(0.0), name="observed", requires_grad=False)

    def observe(self, loss, norm):
        ops.assign_add(self.observed, self.one)

    def construct(self, loss, norm):
        return loss > self.highest


def spikes():
    return [ls.NormSpike(max_norm=12.0, z_score=8.0, window=2), HighLoss()]


def momentum(network):
    return nn.Momentum(network.trainable_params(), learning_rate=0.05, momentum=0.5)


def dynamic(scale=2.0**10, **keywords):
    return ls.DynamicLossScale(scale, scale_window=2, **keywords)


def share_of(place, mean=True):
    """Returns the factor with which the ranks' losses, averaged or summed, have the gradients of one mean loss."""
    return place.ranks / ROWS if mean else 1 / ROWS


def scaled(place, loss_scale=None, mean=True, **keywords):
    parallel(place, mean=mean)
    network = Rows(None if keywords.get("weighted") else share_of(place, mean))
    return ls.ScaledTrainOneStepCell(network, momentum(network), loss_scale or dynamic(), **keywords)


def after_the_verdict(network):
    return {"clip_norm": 0.5, "ema_decay": 0.5, "after_update": ClipWeights([network.weight], 0.9)}


def bounded(place):
    parallel(place)
    network = Rows(share_of(place))
    return ls.ScaledTrainOneStepCell(network, momentum(network), dynamic(), **after_the_verdict(network))


def pair(place, cell_class, loss_scale, mean=True, **keywords):
    """Returns a cell for two networks, of which the first has weights, if any has."""
    parallel(place, mean=mean)
    factors = [None if "weighted" in keywords else share_of(place, mean), share_of(place, mean)]
    networks = [Rows(factor, prefix) for factor, prefix in zip(factors, ("a.", "bb."))]
    optimizers = [momentum(network) for network in networks]
    inputs = [(0, 1, 2), (3, 4, 5)]
    return cell_class(networks, optimizers, loss_scale, network_inputs=inputs, clip_norm=0.5, **keywords)


def simultaneous(place):
    scales, keywords = [dynamic(2.0**9), dynamic(2.0**13)], {"weighted": [True, False], "max_retries": 3}
    return pair(place, ls.SimultaneousTrainOneStepCell, scales, mean=False, **keywords)


def alternating(place):
    keywords = {"every": (1, 2), "gradient_accumulation_steps": 2, "ema_decay": 0.5}
    return pair(place, ls.AlternatingTrainOneStepCell, dynamic(), **keywords)


def reduced_by_hooks(place, network):
    """Makes hooks average the gradients, where there are other ranks. Returns whether they do."""
    if place.ranks == 1:
        return False
    all_reduce, share = ops.AllReduce(), 1.0 / place.ranks

    def averaged(grad):
        return all_reduce(grad) * share

    for each in network.trainable_params():
        each.register_hook(averaged)
    return True


def hooked(place):
    network = Rows(share_of(place))
    is_reduced = reduced_by_hooks(place, network)
    return ls.ScaledTrainOneStepCell(network, momentum(network), dynamic(), gradients_reduced=is_reduced)


def manual(place, network, loss_scale, **keywords):
    """Returns a ManualStep, and a function that makes a step with it, for a network with weights or without."""
    step = ls.ManualStep(network, momentum(network), loss_scale, **keywords)

    def forward(x, y, valid):
        outputs = network(x, y, valid)
        loss, count = outputs if network.factor is None else (outputs, None)
        return step.scale(loss), loss, count

    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)

    def train_step(x, y, valid):
        x, y, valid = step.begin(x, y, valid)
        (_, loss, count), grads = value_and_grad(x, y, valid)
        return loss, step.end(grads, loss=loss, weight=count)

    return step, train_step


def manual_eager(place):
    """The mode is stand_alone, hooks average the gradients, and the argument is the name of a group."""
    network = Rows(None)
    group = GlobalComm.WORLD_COMM_GROUP if reduced_by_hooks(place, network) else False
    keywords = {"gradient_accumulation_steps": 2, "skip_conditions": [HighLoss()], "gradients_reduced": group}
    return manual(place, network, dynamic(2.0**8, **PATIENT), **keywords)


def manual_in_jit(place):
    parallel(place)
    network = Rows(share_of(place))
    step, train_step = manual(place, network, dynamic(), **after_the_verdict(network))
    return step, mindspore.jit(train_step)


class Training(NamedTuple):
    """What makes a cell, or a ManualStep and its function; the rows of each call; and of how many calls a cycle is."""

    make: object
    calls: str
    steps: int = 1
    networks: int = 1


WEIGHTED = {"weighted": True, "gradient_accumulation_steps": 3, "max_retries": 4, "clip_norm": 0.5, "ema_decay": 0.5}
SUMMED = {"mean": False, "clip_value": 0.5, "max_retries": 3}
WEIGHTED_SUM = {"mean": False, "weighted": True, "gradient_accumulation_steps": 2}
OF_WEIGHTED = ".. .s 0. .. n. .. 00 00 00 .0 .. .. s0 .."
TRAININGS = {
    "bounded": Training(bounded, ".. .x .. x. xx .."),
    "summed": Training(lambda place: scaled(place, dynamic(2.0**13), **SUMMED), ".. .s .x ss .."),
    "weighted": Training(lambda place: scaled(place, dynamic(2.0**11, **PATIENT), **WEIGHTED), OF_WEIGHTED, steps=3),
    "weighted_sum": Training(lambda place: scaled(place, **WEIGHTED_SUM), ".. .. 0. .. 00 00 x. .. .. ..", steps=2),
    "patient": Training(lambda place: scaled(place, dynamic(2.0**13, **PATIENT)), ".. n. .n .s .."),
    "conditions": Training(lambda place: scaled(place, dynamic(2.0**8), skip_conditions=spikes()), ".. .. pm p. .h .."),
    "simultaneous": Training(simultaneous, ".. .s x. s. ..", networks=2),
    "alternating": Training(alternating, ".. .. .x .. .. .. .. x. ..", steps=2, networks=2),
    "unchecked": Training(lambda place: scaled(place, ls.FixedLossScale(2.0**10, drop_overflow_update=False)), ".. .."),
    "hooked": Training(hooked, ".. .x .."),
    "manual_eager": Training(manual_eager, ".. 0. .. .h n. .. ..", steps=2),
    "manual_in_jit": Training(manual_in_jit, ".. .x .. x. .."),
}


def train(name, place, ranks):
    """Yields the records of a training: what the cell holds before the first call, and what it holds, returned and
    measured after each; where calls remain, after a flush."""
    training = TRAININGS[name]
    made = training.make(place)
    cell, step = made if isinstance(made, tuple) else (made, made)
    cell.set_train()

    def record(**values):
        values["counters"] = np.array(json.dumps(cell.counters()))
        with contextlib.suppress(RuntimeError):
            # Without clip_norm there is none.
            values["norms"] = np.array(cell.grad_norm())
        return {**state(cell), **values}

    yield record(**(found_loss_scales(cell, place, ranks) if name == "simultaneous" else {}))
    calls = training.calls.split()
    for call, kinds in enumerate(calls):
        # Of two networks, the first gets the unusual rows in even calls, and the second in odd ones.
        unusual = call % training.networks
        kinds_of = [kinds if i == unusual else ".." for i in range(training.networks)]
        inputs = [each for its in kinds_of for each in rows_of(place, call, its, ranks)]
        yield record(overflow=step(*inputs)[1].asnumpy())
    if len(calls) % training.steps:
        cell.flush()
        yield record()


def found_loss_scales(cell, place, ranks):
    """Returns what it finds for batches of which one is steep on one rank, and its error if one is NaN on one rank."""
    steep, nan, good = (rows_of(place, 0, kinds, ranks) for kinds in (".s", "n.", ".."))
    before = cell.get_loss_scale()
    values = {"found": np.array(cell.find_loss_scale(*good, *steep))}
    values["refused"] = np.array(error_of(cell.find_loss_scale, *nan, *good))
    values["kept"] = np.array(cell.get_loss_scale())
    cell.set_loss_scale(before)
    return values


def error_of(call, *arguments, **keywords):
    """Returns the message with which the package refuses a call; nothing if it does not."""
    try:
        call(*arguments, **keywords)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def in_mode(mode, scenario, *arguments):  # The records of a scenario, dicts, in the given mode. Restores the mode.
    with support.in_mode.in_mode(MODES[mode]):
        try:
            return list(scenario(*arguments))
        finally:
            mindspore.reset_auto_parallel_context()
