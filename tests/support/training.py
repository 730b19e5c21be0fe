"""Helpers for training cells: compare them with a plain one, read all that they hold, and restore it."""

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale as ls

KINDS = {
    **{"scaled": ls.ScaledTrainOneStepCell, "simultaneous": ls.SimultaneousTrainOneStepCell},
    **{"alternating": ls.AlternatingTrainOneStepCell, "manual": ls.ManualStep},
}


def cell_of(kind, networks, optimizers, loss_scale, **keywords):  # A training cell of one of KINDS, in training mode.
    both = (networks[0], optimizers[0]) if len(networks) == 1 else (networks, optimizers)
    return KINDS[kind](*both, loss_scale, **keywords).set_train()


def by_sgd(networks, loss_scale=None, rate=0.01, kind="scaled", **keywords):
    """Returns a training cell of one network or a list of them, in training mode, each of which an SGD trains."""
    networks = networks if isinstance(networks, list) else [networks]
    optimizers = [nn.SGD(network.trainable_params(), rate) for network in networks]
    return cell_of(kind, networks, optimizers, loss_scale, **keywords)


def stepping(step, forward, how="eagerly", tells_loss=False, weight=None, has_aux=False):
    """Returns a function that makes a step of a ManualStep and returns what `forward` does, and the overflow."""
    value_and_grad = step.value_and_grad(forward, has_aux=has_aux)

    def train_step(*inputs):
        begun = step.begin(*inputs)
        loss, grads = value_and_grad(*(begun if len(inputs) > 1 else (begun,)))
        return loss, step.end(grads, loss=loss if tells_loss else None, weight=weight)

    return mindspore.jit(train_step) if how == "in_jit" else train_step


class OneForward(nn.TrainOneStepCell):
    """The stock cell with exactly one forward. In PyNative mode, MindSpore sometimes runs it again to differentiate,
    and BatchNorm's statistics move twice."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.value_and_grad = ops.value_and_grad(network, None, self.weights)

    def construct(self, *inputs):
        loss, grads = self.value_and_grad(*inputs)
        return ops.depend(loss, self.optimizer(grads))


class Recording(ls.LossScaleMonitor):  # Keeps the records, which it reads at the end of an epoch.
    def __init__(self, every_n_steps=1000, **keywords):
        super().__init__(every_n_steps=every_n_steps, **keywords)
        self.records = []

    def on_record(self, record):
        self.records.append(record)


def state(cell):  # A copy of every Parameter's value, by name.
    return {name: parameter.asnumpy().copy() for name, parameter in cell.parameters_dict().items()}


def restore(cell, values):
    """Writes the values of an earlier `state` back.

    It does not use `set_data`: a compiled graph with branches goes on using the old memory (MindSpore 2.7 to 2.10)."""
    for name, parameter in cell.parameters_dict().items():
        ops.assign(parameter, Tensor(values[name]))


def same_bits(a, b):  # Whether two arrays are equal bit for bit: NaN equals itself, and 0.0 is not -0.0.
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def changed(before, after):  # The names of the values whose bits differ.
    assert before.keys() == after.keys()
    return {name for name in before if not same_bits(before[name], after[name])}


def of_both(cell, step):
    """Returns the state of a training cell and of a ManualStep, without what only the latter keeps of a cycle, and the
    losses, which the latter may not know."""
    own = ("sum_of_weights", "is_weighted", "sum_of_losses", "missing_losses", "settings")
    own = tuple(f"accumulation.{name}" for name in own)
    return [{name: value for name, value in state(its).items() if not name.endswith(own)} for its in (cell, step)]


def bookkeeping(names):  # The names that a skipped step may change: those of the loss scale and the step counters.
    return {name for name in names if name.startswith(("loss_scale.", "step_counters."))}


def weights(network):  # The values of the weights, in order.
    return [parameter.asnumpy().copy() for parameter in network.trainable_params()]


def assert_equal_weights(network, expected):  # Asserts that two networks have the same weights, bit for bit.
    for actual, wanted in zip(weights(network), weights(expected)):
        np.testing.assert_array_equal(actual, wanted)
