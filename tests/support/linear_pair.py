"""Linear models for one and two networks, their data, and all three training cells on them, with the reference."""

import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale as ls
from support.configured_reference import ROUNDING, finite_or_nan
from support.networks import BATCH, FEATURES, Linear, weight
from support.reference import AlternatingReference, DynamicRule, NetworkReference, Run, StepReference
from support.training import cell_of

LEARNING_RATE = 0.1
MOMENTUM = 0.9

CELLS = ["scaled", "simultaneous", "alternating"]

# Positions among the three inputs x0, x1 and y.
NETWORK_INPUTS = [(0, 2), (1, 2)]


class First(Linear):  # The mean squared error of `x @ weight - y`.
    def __init__(self):
        super().__init__()
        self.weight.name = "first.weight"


class Second(nn.Cell):
    """The mean squared error of `x @ (weight + first.weight) - y`, which shows the first's weights that it used."""

    def __init__(self, first):
        super().__init__(auto_prefix=False)
        self.first, self.weight = first, weight(FEATURES, 1, seed=1, name="second.weight")

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.weight + self.first.weight) - y).mean()


def arrays(seed=0, overflows=(False, False), batch=BATCH):
    """Returns the arrays x0, x1 and y. With `overflows[i]`, only the gradients of network i are not finite."""
    rng = np.random.default_rng(seed)
    x0, x1, y = (rng.normal(size=(batch, n)).astype(np.float32) for n in (FEATURES, FEATURES, 1))
    for x, overflow in zip((x0, x1), overflows):
        if overflow:
            x[0, 0] = np.inf
    return x0, x1, y


def momentum(parameters, learning_rate=LEARNING_RATE):
    return nn.Momentum(parameters, learning_rate=learning_rate, momentum=MOMENTUM)


class NumPyMomentum:  # nn.Momentum in NumPy.
    velocities = 0.0

    def __call__(self, weights, gradients):
        self.velocities = MOMENTUM * self.velocities + np.stack(gradients)
        return list(np.stack(weights) - LEARNING_RATE * self.velocities)


class LinearReference(NetworkReference):
    """The linear models in float64. Each adds the present weights of `others` to its own."""

    def __init__(self, start, others, **keywords):
        super().__init__([start.astype(np.float64)], NumPyMomentum(), **keywords)
        self.others = others

    def run(self, inputs, scale):
        x, y = (np.asarray(array, np.float64) for array in inputs)
        with np.errstate(all="ignore"):
            errors = x @ (self.weights[0] + sum(other.weights[0] for other in self.others)) - y
            return Run(np.mean(errors**2), [2 / len(x) * x.T @ errors])


class Trained:
    """A training cell on the linear models, and its reference.

    Args:
        kind (str): One of CELLS.
        scale, scale_window: Those of the DynamicLossScale.
        steps, clip_norm, clip_value, ema_decay, every: As in the contract; lists have one entry for each network."""

    def __init__(self, kind, *, scale=2.0**10, scale_window=2, steps=1, every=None, **keywords):
        self.kind, self.networks = kind, [First()]
        if kind != "scaled":
            self.networks.append(Second(self.networks[0]))
        self.weights = [network.weight for network in self.networks]
        self.optimizers = [momentum([own]) for own in self.weights]
        loss_scale, its = ls.DynamicLossScale(scale, scale_window=scale_window), {"gradient_accumulation_steps": steps}
        its.update({} if kind == "scaled" else {"network_inputs": NETWORK_INPUTS})
        its.update({"every": every} if kind == "alternating" else {})
        self.cell = cell_of(kind, self.networks, self.optimizers, loss_scale, **its, **keywords)
        self.references = []
        for i, own in enumerate(self.weights):
            values = {name: keywords.get(name) for name in ("clip_norm", "clip_value", "ema_decay")}
            values = {name: value[i] if isinstance(value, list) else value for name, value in values.items()}
            self.references.append(LinearReference(own.asnumpy(), tuple(self.references), **values))
        groups = [[own] for own in self.references] if kind == "alternating" else [self.references]
        phases = [StepReference(group, [DynamicRule(scale, scale_window)], steps) for group in groups]
        self.control = AlternatingReference(phases, every) if kind == "alternating" else phases[0]

    @property
    def steps(self):  # The references that have an update rule and counters.
        return self.control.phases if self.kind == "alternating" else [self.control]

    def call_cell(self, seed=0, overflows=(False, False)):  # Calls the cell once.
        x0, x1, y = (Tensor(array) for array in arrays(seed, overflows))
        return self.cell(x0, y) if self.kind == "scaled" else self.cell(x0, x1, y)

    def call(self, seed=0, overflows=(False, False)):
        """Calls the cell and the reference with the same batch, and compares all results."""
        x0, x1, y = arrays(seed, overflows)
        losses, overflow, scale, _ = self.control.call([(x0, y), (x1, y)][: len(self.networks)])
        output = self.call_cell(seed, overflows)
        np.testing.assert_array_equal(output[1].asnumpy(), overflow)
        np.testing.assert_array_equal(output[2].asnumpy(), np.float32(scale).reshape(output[2].shape))
        # An overflowing batch makes the loss infinite or NaN; which of them does not matter.
        np.testing.assert_allclose(finite_or_nan(output[0].asnumpy()), finite_or_nan(sum(losses)), **ROUNDING)
        if self.kind != "scaled":
            np.testing.assert_allclose(finite_or_nan(output[3].asnumpy()), finite_or_nan(losses), **ROUNDING)
        self.compare()
        return output

    def flush(self):
        self.control.flush()
        self.cell.flush()
        self.compare()

    def compare(self):  # Compares the cell's state with the reference's.
        for own, control in zip(self.weights, self.references):
            np.testing.assert_allclose(own.asnumpy(), control.weights[0], **ROUNDING)
        pairs = zip(self.weights, self.references)
        expected = {own.name: control.averages[0] for own, control in pairs if control.ema_decay is not None}
        averages = self.cell.ema_parameters() if expected else {}
        assert averages.keys() == expected.keys()
        for name, average in averages.items():
            np.testing.assert_allclose(average.asnumpy(), expected[name], **ROUNDING)
        wanted = [None if control.clip_norm is None else control.grad_norm for control in self.references]
        if any(norm is not None for norm in wanted):
            norms = np.atleast_1d(self.cell.grad_norm())
            assert [norm is None for norm in norms] == [norm is None for norm in wanted]
            np.testing.assert_allclose(*(finite_or_nan(np.array(its, float)) for its in (norms, wanted)), **ROUNDING)
        scales, counters = zip(*((step.rules[0].scale, step.counters) for step in self.steps))
        held = self.cell.get_loss_scale(), self.cell.counters()
        assert held == ((list(scales), list(counters)) if self.kind == "alternating" else (scales[0], counters[0]))
