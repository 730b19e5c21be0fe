"""Linear models for one and two networks, their data, and all three training cells on them, with the reference."""

import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale as ls
from support.configured_reference import ROUNDING, finite_or_nan
from support.networks import BATCH, FEATURES, Linear, weight
from support.reference import AlternatingReference, DynamicRule, FixedRule, NetworkReference, Run, StepReference

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
        self.first = first
        self.weight = weight(FEATURES, 1, seed=1, name="second.weight")

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


class NumPyMomentum:  # nn.Momentum in NumPy. It takes a learning rate for each applied step; the last one is kept.
    def __init__(self, learning_rates):
        self.learning_rates = list(learning_rates)
        self.velocities = 0.0

    def __call__(self, weights, gradients):
        rate = self.learning_rates.pop(0) if len(self.learning_rates) > 1 else self.learning_rates[0]
        self.velocities = MOMENTUM * self.velocities + np.stack(gradients)
        return list(np.stack(weights) - rate * self.velocities)


class LinearReference(NetworkReference):
    """The linear models in float64. Each adds the present weights of `others` to its own."""

    def __init__(self, start, others, learning_rates, **keywords):
        super().__init__([start.astype(np.float64)], NumPyMomentum(learning_rates), **keywords)
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
        scale, scale_window: Those of the DynamicLossScale; with `scale_window=None`, the scale is fixed.
        steps, clip_norm, clip_value, ema_decay, every: As in the contract; lists have one entry for each network."""

    def __init__(
        self,
        kind,
        *,
        scale=2.0**10,
        scale_window=2,
        steps=1,
        clip_norm=None,
        clip_value=None,
        ema_decay=None,
        every=None,
        learning_rates=None,
        **keywords,
    ):
        self.kind = kind
        self.networks = [First()]
        if kind != "scaled":
            self.networks.append(Second(self.networks[0]))
        rate = learning_rates or LEARNING_RATE
        self.weights = [network.weight for network in self.networks]
        self.optimizers = [momentum([own], rate) for own in self.weights]
        keywords.update(
            gradient_accumulation_steps=steps, clip_norm=clip_norm, clip_value=clip_value, ema_decay=ema_decay
        )
        loss_scale = scale if scale_window is None else ls.DynamicLossScale(scale, scale_window=scale_window)
        if kind == "scaled":
            self.cell = ls.ScaledTrainOneStepCell(self.networks[0], self.optimizers[0], loss_scale, **keywords)
        elif kind == "simultaneous":
            self.cell = ls.SimultaneousTrainOneStepCell(
                self.networks, self.optimizers, loss_scale, network_inputs=NETWORK_INPUTS, **keywords
            )
        else:
            self.cell = ls.AlternatingTrainOneStepCell(
                self.networks, self.optimizers, loss_scale, network_inputs=NETWORK_INPUTS, every=every, **keywords
            )
        self.cell.set_train()

        def entry(value, i):
            return value[i] if isinstance(value, list) else value

        self.references = []
        for i, own in enumerate(self.weights):
            self.references.append(
                LinearReference(
                    own.asnumpy(),
                    tuple(self.references),
                    learning_rates or (LEARNING_RATE,),
                    clip_norm=entry(clip_norm, i),
                    clip_value=entry(clip_value, i),
                    ema_decay=entry(ema_decay, i),
                )
            )

        def rule():
            return FixedRule(scale) if scale_window is None else DynamicRule(scale, scale_window)

        if kind == "alternating":
            phases = [StepReference([own], [rule()], steps) for own in self.references]
            self.control = AlternatingReference(phases, every)
        else:
            self.control = StepReference(self.references, [rule()], steps)

    @property
    def steps(self):
        """The references that have an update rule and counters."""
        return self.control.phases if self.kind == "alternating" else [self.control]

    def call_cell(self, seed=0, overflows=(False, False)):
        """Calls the cell once."""
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

    def compare(self):
        """Compares the cell's state with the reference's."""
        for own, control in zip(self.weights, self.references):
            np.testing.assert_allclose(own.asnumpy(), control.weights[0], **ROUNDING)
        if any(control.ema_decay is not None for control in self.references):
            averages = self.cell.ema_parameters()
            expected = {
                own.name: control.averages[0]
                for own, control in zip(self.weights, self.references)
                if control.ema_decay is not None
            }
            assert averages.keys() == expected.keys()
            for name, average in averages.items():
                np.testing.assert_allclose(average.asnumpy(), expected[name], **ROUNDING)
        if any(control.clip_norm is not None for control in self.references):
            norms = self.cell.grad_norm()
            for norm, control in zip([norms] if self.kind == "scaled" else norms, self.references):
                if control.clip_norm is None:
                    assert norm is None
                else:
                    np.testing.assert_allclose(finite_or_nan(norm), finite_or_nan(control.grad_norm), **ROUNDING)
        scales = [step.rules[0].scale for step in self.steps]
        counters = [step.counters for step in self.steps]
        if self.kind == "alternating":
            assert self.cell.get_loss_scale() == scales
            assert self.cell.counters() == counters
        else:
            assert self.cell.get_loss_scale() == scales[0]
            assert self.cell.counters() == counters[0]
