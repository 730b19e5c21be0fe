"""Compares a training cell of a drawn configuration with its reference, in everything that each call does."""

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    SkipCondition,
)
from support.configurations import CONDITIONS, LOSS_BOUND, LOSS_GROWTH, RULES, inputs
from support.in_mode import in_mode
from support.optimizers import make_optimizer
from support.reference import AlternatingReference, NetworkReference, Run, Shared, StepReference
from support.training import changed, same_bits, state

# There are some 12 steps of some 20 roundings each, by float32's 2**-24 = 6e-8 of numbers of the order of 1. A
# forgotten or doubled call, division, clip or average is off by 1e-2 or more.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
FLOAT16_MAX = 65504.0


class Bank(nn.Cell):
    """Holds a mean and a count of its runs."""

    def __init__(self, name):
        super().__init__(auto_prefix=False)
        self.mean = Parameter(Tensor(np.zeros(2, np.float32)), name=f"{name}.mean", requires_grad=False)
        self.count = Parameter(Tensor(0, mstype.int32), name=f"{name}.count", requires_grad=False)
        self.one = Tensor(1, mstype.int32)

    def construct(self, x):
        ops.assign(self.count, self.count + self.one)
        ops.assign(self.mean, 0.5 * self.mean + 0.5 * x)
        return x


class Sloped(nn.Cell):
    """
    Its weight's gradient depends on all earlier weights, and contains `slope`, which goes through float16 in the
    backward and overflows there at a high scale. The forward writes a mean and a count of its runs, and those that all
    networks share. It can reach those of the earlier networks, too, which it leaves alone. If it is weighted, its loss
    is a sum over one thing or two, which its input tells.
    """

    def __init__(self, i, earlier, seed, weighted):
        super().__init__(auto_prefix=False)
        values = np.random.default_rng([seed, i]).integers(-16, 17, (2, 2)).astype(np.float32) / 8
        self.weight = Parameter(Tensor(values[0]), name=f"n{i}.weight")
        self.bias = Parameter(Tensor(values[1]), name=f"n{i}.bias")
        self.own, self.shared = Bank(f"n{i}"), Bank("shared") if earlier is None else earlier.shared
        self.earlier = earlier
        self.weighted = weighted
        self.one = Tensor(1.0, mstype.float32)

    def construct(self, x, slope):
        self.own(x[1])
        self.shared(x[1])
        weight = self.weight + self.bias
        if self.earlier is not None:
            weight = weight + self.earlier.weight
        errors = weight - x[0]
        # Zeros that have a gradient: the value of the loss stays exact.
        zeros = self.weight - ops.stop_gradient(self.weight)
        sloped = (zeros.astype(mstype.float16) * slope.astype(mstype.float16)).astype(mstype.float32)
        loss = 0.25 * ops.square(errors).sum() + sloped.sum()
        if self.weighted:
            number = self.one + (x[0, 0] > 0).astype(mstype.float32)
            return loss * number, number
        return loss


class Drifts(nn.Cell):
    """Adds the number of its calls to the gradients. Steps that are skipped or retried do not count."""

    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0.0, mstype.float32), name="calls", requires_grad=False)
        self.one, self.share = Tensor(1.0, mstype.float32), Tensor(2.0**-6, mstype.float32)

    def construct(self, grads):
        ops.assign(self.calls, self.calls + self.one)
        drift = self.share * self.calls
        return grads[0] + drift, grads[1] + drift


class HighLoss(SkipCondition):
    """A user's own condition, with a bound that grows with each step that is applied."""

    def __init__(self):
        super().__init__()
        self.bound = Parameter(Tensor(LOSS_BOUND, mstype.float32), name="bound", requires_grad=False)
        self.growth = Tensor(LOSS_GROWTH, mstype.float32)

    def construct(self, loss, norm):
        return loss > self.bound

    def observe(self, loss, norm):
        ops.assign(self.bound, self.bound + self.growth)


class TupleOf(nn.Cell):
    """One network that returns the losses of all."""

    def __init__(self, networks):
        super().__init__(auto_prefix=False)
        self.networks = nn.CellList(networks, auto_prefix=False)

    def construct(self, *values):
        losses = ()
        for i, network in enumerate(self.networks):
            losses += (network(values[2 * i], values[2 * i + 1]),)
        return losses


class SlopedReference(NetworkReference):
    """The same network in NumPy, in float32."""

    def __init__(self, network, earlier, optimizer, transforms, **keywords):
        weights = [network.weight.asnumpy().copy(), network.bias.asnumpy().copy()]
        super().__init__(weights, optimizer, (np.zeros(2, np.float32), 0), **keywords)
        self.earlier, self.transforms = earlier, transforms
        self.shared = Shared((np.zeros(2, np.float32), 0)) if earlier is None else earlier.shared

    def transform(self, gradients, steps):
        drift = np.float32((steps + 1) * 2.0**-6 if self.transforms else 0)
        return [gradient + drift for gradient in gradients]

    def run(self, values, scale):
        x, slope = values
        weight = self.weights[0] + self.weights[1]
        if self.earlier is not None:
            weight = weight + self.earlier.weights[0]
        errors = weight - x[0]
        number = np.float32(2.0 if self.weighted and x[0, 0] > 0 else 1.0)
        holds = scale * number <= FLOAT16_MAX and abs(scale * number * slope) <= FLOAT16_MAX
        mean, count = self.state
        shared_mean, shared_count = self.shared.value
        mean, shared_mean = (np.float32(0.5) * each + np.float32(0.5) * x[1] for each in (mean, shared_mean))
        return Run(
            loss=np.float32(0.25) * np.sum(errors**2) if np.isfinite(slope) else np.nan,
            gradients=[
                number * (slope + np.float32(0.5) * errors) if holds else np.full(2, np.inf),
                number * np.float32(0.5) * errors,
            ],
            state=(mean, count + 1),
            shared=(shared_mean, shared_count + 1),
            forward_overflowed=bool(np.isfinite(self.state[0]).all() and not np.isfinite(mean).all()),
            weight=number,
        )


class Weights(nn.Cell):
    """The weights of a reference, for MindSpore's own optimizer."""

    def __init__(self, network):
        super().__init__()
        self.weight, self.bias = (
            Parameter(own.asnumpy().copy(), name=own.name) for own in (network.weight, network.bias)
        )


class ByHand:
    """MindSpore's own optimizer, called by hand."""

    def __init__(self, name, network):
        with in_mode(mindspore.PYNATIVE_MODE):
            self.own = Weights(network)
            self.optimizer, _ = make_optimizer(name, self.own)

    def __call__(self, weights, gradients):
        with in_mode(mindspore.PYNATIVE_MODE):
            self.optimizer(tuple(Tensor(gradient.astype(np.float32)) for gradient in gradients))
        return [self.own.weight.asnumpy().copy(), self.own.bias.asnumpy().copy()]


class ConfiguredTraining:
    """A cell of this configuration. Another seed gives other weights, to load a checkpoint into."""

    def __init__(self, configuration, seed=0):
        self.configuration = configuration
        self.networks = []
        for i in range(configuration.count):
            weighted = bool(configuration.of_network("weighted", i))
            self.networks.append(Sloped(i, self.networks[-1] if i else None, seed, weighted))
        self.optimizers = [make_optimizer(*pair)[0] for pair in zip(configuration.optimizers, self.networks)]
        loss_scales = [RULES[name][0]() for name in configuration.rules]
        loss_scale = loss_scales if configuration.has_own_scales else loss_scales[0]
        keywords = dict(configuration.keywords)
        if configuration.transforms:
            of_each = [[Drifts()] for _ in self.networks]
            keywords["gradient_transforms"] = of_each[0] if configuration.cell == "scaled" else of_each
        if configuration.condition is not None:
            # Those of networks that take turns are copied.
            keywords["skip_conditions"] = [(CONDITIONS[configuration.condition][0] or HighLoss)()]
        if configuration.cell == "scaled":
            cell = ScaledTrainOneStepCell(self.networks[0], self.optimizers[0], loss_scale, **keywords)
        elif configuration.cell == "tuple":
            cell = SimultaneousTrainOneStepCell(TupleOf(self.networks), self.optimizers, loss_scale, **keywords)
        else:
            make = {"simultaneous": SimultaneousTrainOneStepCell, "alternating": AlternatingTrainOneStepCell}
            positions = [(2 * i, 2 * i + 1) for i in range(configuration.count)]
            cell = make[configuration.cell](
                self.networks, self.optimizers, loss_scale, network_inputs=positions, **keywords
            )
        self.cell = cell.set_train()

    def act(self, action):
        if action:
            getattr(self.cell, action[0])(*action[1:])

    def call(self, index):
        """Returns the results of a call, as arrays."""
        values = map(Tensor, inputs(self.configuration, index))
        return [np.asarray(value.asnumpy()) for value in self.cell(*values)]


_OF_NETWORK = ("clip_norm", "clip_value", "ema_decay", "weighted")


class Reference:
    """The reference of a training."""

    def __init__(self, training):
        configuration = training.configuration
        self.configuration = configuration
        self.networks = []
        for i, network in enumerate(training.networks):
            self.networks.append(
                SlopedReference(
                    network,
                    self.networks[-1] if i else None,
                    ByHand(configuration.optimizers[i], network),
                    configuration.transforms,
                    **{name: configuration.of_network(name, i) for name in _OF_NETWORK},
                )
            )
        settings = (configuration.steps, configuration.keywords["max_retries"], configuration.checks)
        self.alternates = configuration.cell == "alternating"
        undoes_shared = not self.alternates or configuration.steps == 1
        keywords = {"shared": self.networks[0].shared, "undoes_shared": undoes_shared}
        if self.alternates:
            for network in self.networks[:-1]:
                network.is_undone_last = not undoes_shared
            names = configuration.rules if configuration.has_own_scales else configuration.rules * configuration.count
            self.phases = [
                StepReference([network], [RULES[name][1]()], *settings, **keywords, **self._conditions())
                for network, name in zip(self.networks, names)
            ]
            self.whole = AlternatingReference(self.phases, configuration.keywords.get("every"))
        else:
            rules = [RULES[name][1]() for name in configuration.rules]
            self.whole = StepReference(self.networks, rules, *settings, **keywords, **self._conditions())
            self.phases = [self.whole]

    def _conditions(self):
        name = self.configuration.condition
        return {} if name is None else {"skip_conditions": [CONDITIONS[name][1]()]}

    def act(self, action):
        name = action[0] if action else None
        if name == "flush":
            self.whole.flush()
        elif name == "set_every":
            self.whole.every = action[1]
        elif name == "set_loss_scale":
            rules = [(phase, i) for phase in self.phases for i in range(len(phase.rules))]
            values = action[1] if isinstance(action[1], list) else [action[1]]
            for (phase, i), value in zip(rules, values):
                phase.set_loss_scale(i, value)

    def call(self, index):
        values = inputs(self.configuration, index)
        return self.whole.call([values[2 * i : 2 * i + 2] for i in range(self.configuration.count)])

    def scales(self):
        scales = [rule.scale for phase in self.phases for rule in phase.rules]
        return scales if self.alternates or self.configuration.has_own_scales else scales[0]

    def counters(self):
        counters = [phase.counters for phase in self.phases]
        return counters if self.alternates else counters[0]


class Comparison:
    """Compares a training with its reference."""

    def __init__(self, training):
        self.training, self.reference = training, Reference(training)
        self.configuration = training.configuration
        self.assert_close = np.testing.assert_array_equal if self.configuration.is_exact else _assert_close

    def act(self, action):
        self.training.act(action)
        self.reference.act(action)
        self._compare_state()

    def call(self, index):
        """Makes one call of both. Returns the cell's results."""
        losses, overflow, scales = self.reference.call(index)
        outputs = self.training.call(index)
        np.testing.assert_array_equal(outputs[1], overflow)
        np.testing.assert_array_equal(outputs[2], np.float32(scales).reshape(outputs[2].shape))
        if self.configuration.cell == "scaled":
            self._compare_losses(outputs[0], losses[0])
        else:
            self._compare_losses(outputs[0], outputs[3].sum(dtype=np.float64))
            for own, loss in zip(outputs[3], losses):
                self._compare_losses(own, loss)
        self._compare_state()
        return outputs

    @staticmethod
    def _compare_losses(own, loss):
        # They are sums in different orders.
        _assert_close(own, loss if np.isfinite(loss) else np.nan)

    def _compare_state(self):
        cell, reference = self.training.cell, self.reference
        assert cell.get_loss_scale() == reference.scales()
        assert cell.counters() == reference.counters()
        for i, (network, wanted) in enumerate(zip(self.training.networks, reference.networks)):
            self.assert_close(network.weight.asnumpy(), wanted.weights[0])
            self.assert_close(network.bias.asnumpy(), wanted.weights[1])
            for bank, (mean, count) in ((network.own, wanted.state), (network.shared, wanted.shared.value)):
                np.testing.assert_array_equal(bank.mean.asnumpy(), mean)
                assert int(bank.count.asnumpy()) == count
            self._compare_optimizers(self.training.optimizers[i], wanted.optimizer.optimizer)
        self._compare_averages(cell, reference)
        self._compare_norms(cell, reference)
        self._compare_conditions(cell, reference)

    def _compare_optimizers(self, own, wanted):
        """Compares moments, numbers of steps, and all other optimizer state."""
        for parameter, its in zip(own.get_parameters(), wanted.get_parameters()):
            assert parameter.name.endswith(its.name)
            self.assert_close(parameter.asnumpy(), its.asnumpy())

    def _compare_averages(self, cell, reference):
        decays = [wanted.ema_decay is not None for wanted in reference.networks]
        if any(decays):
            averages = cell.ema_parameters()
            assert len(averages) == 2 * sum(decays)
            for network, wanted, has_decay in zip(self.training.networks, reference.networks, decays):
                if has_decay:
                    self.assert_close(averages[network.weight.name].asnumpy(), wanted.averages[0])
                    self.assert_close(averages[network.bias.name].asnumpy(), wanted.averages[1])

    @staticmethod
    def _compare_norms(cell, reference):
        if all(wanted.clip_norm is None for wanted in reference.networks):
            return
        norms = cell.grad_norm()
        for norm, wanted in zip(norms if isinstance(norms, list) else [norms], reference.networks):
            if wanted.clip_norm is None:
                assert norm is None
            elif np.isfinite(wanted.grad_norm):
                assert type(norm) is float
                np.testing.assert_allclose(norm, wanted.grad_norm, **ROUNDING)
            else:
                assert not np.isfinite(norm)

    def _compare_conditions(self, cell, reference):
        names = {"spike": {"mean": "norm_spike.mean", "steps": "norm_spike.steps"}, "high loss": {"bound": "bound"}}
        held = cell.parameters_dict()
        for i, phase in enumerate(reference.phases):
            prefix = f"network_{i}." if reference.alternates else ""
            for condition in phase.conditions:
                for attribute, name in names[self.configuration.condition].items():
                    _assert_close(held[prefix + name].asnumpy(), getattr(condition, attribute))


def _assert_close(own, wanted):
    np.testing.assert_allclose(own, wanted, **ROUNDING)


def resumed(configuration, cell, way):
    """Returns a new training that resumes from the cell's state."""
    fresh = ConfiguredTraining(configuration, seed=1)
    if way == "copies":
        copies = {name: Tensor(value) for name, value in state(cell).items()}
        assert fresh.cell.load_state_dict(copies) == ([], [])
    else:
        mindspore.save_checkpoint(cell, "cell.ckpt")
        loaded = mindspore.load_checkpoint("cell.ckpt")
        if way == "load_state_dict":
            assert fresh.cell.load_state_dict(loaded) == ([], [])
        else:
            assert mindspore.load_param_into_net(fresh.cell, loaded) == ([], [])
    return fresh


def check(configuration):
    """
    Makes all calls, and compares after each. From `resume_at` on, a second cell resumes from a checkpoint, and must
    give and hold the same, bit for bit.
    """
    training = ConfiguredTraining(configuration)
    comparison, second = Comparison(training), None
    for index, call in enumerate(configuration.calls):
        # When networks take turns, a flushed cycle shows the losses of a call before the checkpoint.
        flushes = call.action == ("flush",) and configuration.cell == "alternating"
        resumes = index == configuration.resume_at
        if resumes and not flushes:
            second = resumed(configuration, training.cell, configuration.resume)
        comparison.act(call.action)
        if second is not None:
            second.act(call.action)
        elif resumes:
            second = resumed(configuration, training.cell, configuration.resume)
        outputs = comparison.call(index)
        if second is not None:
            assert all(same_bits(*pair) for pair in zip(second.call(index), outputs))
            assert changed(state(second.cell), state(training.cell)) == set()
