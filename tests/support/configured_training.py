"""Compares a training cell of a drawn configuration with its reference, in everything that each call does."""

import contextlib

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

import ms_lossscale as ls
from support.configurations import BAD_WEIGHTS, CONDITIONS, GRADIENT_BOUND, LOSS_BOUND, LOSS_GROWTH, RULES, inputs
from support.configured_reference import RECORDED, Comparison, Reference, compare, numbered, of_records
from support.in_mode import in_mode
from support.optimizers import make_optimizer
from support.training import Recording, changed, state


class Bank(nn.Cell):  # Holds a mean and a count of its runs. A mean that `is_given` is registered like a weight.
    def __init__(self, name, is_given=False):
        super().__init__(auto_prefix=False)
        self.mean = Parameter(Tensor(np.zeros(2, np.float32)), name=f"{name}.mean", requires_grad=is_given)
        self.count = Parameter(Tensor(0, mstype.int32), name=f"{name}.count", requires_grad=False)
        self.one = Tensor(1, mstype.int32)

    @property
    def values(self):
        return self.mean, self.count

    def construct(self, x):
        ops.assign(self.count, self.count + self.one)
        ops.assign(self.mean, 0.5 * self.mean + 0.5 * x)
        return x


class Sloped(nn.Cell):
    """Its weight's gradient depends on all earlier weights, and contains `slope`, which goes through float16 in the
    backward and overflows there at a high scale. The forward writes a mean and a count of its runs, and those that all
    networks share. It can reach those of the earlier networks, too, which it leaves alone. If it is weighted, its loss
    is a sum over nothing, one thing or two, which its input tells. Its aux are its weight, and what it computed."""

    def __init__(self, i, earlier, seed, configuration):
        super().__init__(auto_prefix=False)
        values = np.random.default_rng([seed, i]).integers(-16, 17, (2, 2)).astype(np.float32) / 8
        self.weight = Parameter(Tensor(values[0]), name=f"n{i}.weight")
        self.bias = Parameter(Tensor(values[1]), name=f"n{i}.bias")
        self.own, self.earlier = Bank(f"n{i}"), earlier
        self.shared = Bank("shared", "forward_state" in configuration.own) if earlier is None else earlier.shared
        self.weighted, self.has_aux = (bool(configuration.of_network(name, i)) for name in ("weighted", "has_aux"))
        self.takes_all = configuration.keywords.get("network_inputs", ()) is None and not configuration.is_manual
        self.first, self.one, self.raises = 2 * i, Tensor(1.0, mstype.float32), False

    def construct(self, *values):
        x, slope = values[self.first : self.first + 2] if self.takes_all else values
        self.own(x[1])
        self.shared(x[1])
        if self.raises:
            raise ValueError("on purpose")
        weight = self.weight + self.bias
        if self.earlier is not None:
            weight = weight + self.earlier.weight
        errors = weight - x[0]
        # Zeros that have a gradient: the value of the loss stays exact.
        zeros = self.weight - ops.stop_gradient(self.weight)
        sloped = (zeros.astype(mstype.float16) * slope.astype(mstype.float16)).astype(mstype.float32)
        output = (0.25 * ops.square(errors).sum() + sloped.sum(),)
        if self.weighted:
            number = (x[0, 0] > -1.5).astype(mstype.float32) + (x[0, 0] > 0).astype(mstype.float32)
            for each, weight in BAD_WEIGHTS.items():
                number = ops.select(x[0, 0] == each, weight * self.one, number)
            # A sum over nothing may be a number, too.
            output = (output[0] * number + 0.25 * (number == 0).astype(mstype.float32), number)
        if self.has_aux:
            output += (self.weight, errors)
        return output if self.weighted or self.has_aux else output[0]


class Drifts(nn.Cell):  # Adds the number of its calls to the gradients. Steps that are skipped or retried do not count.
    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0.0, mstype.float32), name="calls", requires_grad=False)
        self.one, self.share = Tensor(1.0, mstype.float32), Tensor(2.0**-6, mstype.float32)

    def construct(self, grads):
        ops.assign(self.calls, self.calls + self.one)
        drift = self.share * self.calls
        return grads[0] + drift, grads[1] + drift


class Halves(nn.Cell):  # Halves the biases after an update.
    def __init__(self, networks):
        super().__init__(auto_prefix=False)
        self.networks = nn.CellList(networks, auto_prefix=False)

    def construct(self):
        for network in self.networks:
            ops.assign(network.bias, 0.5 * network.bias)


class LargeGradients(ls.OverflowDetector):
    """A user's own detector, which counts how often it is asked. What is not finite is not within the bound, either."""

    def __init__(self):
        super().__init__()
        self.asked = Parameter(Tensor(0, mstype.int32), name="asked", requires_grad=False)
        self.one = Tensor(1, mstype.int32)

    def construct(self, grads):
        ops.assign(self.asked, self.asked + self.one)
        within = [(ops.abs(grad) <= GRADIENT_BOUND).all() for grad in grads]
        return ops.logical_not(ops.stack(within).all())


class HighLoss(ls.SkipCondition):  # A user's own condition, with a bound that grows with each step that is applied.
    def __init__(self):
        super().__init__()
        self.bound = Parameter(Tensor(LOSS_BOUND, mstype.float32), name="bound", requires_grad=False)
        self.last = Parameter(Tensor(0.0, mstype.float32), name="last", requires_grad=False)
        self.growth = Tensor(LOSS_GROWTH, mstype.float32)

    def construct(self, loss, norm):
        return loss > self.bound

    def observe(self, loss, norm):
        ops.assign(self.bound, self.bound + self.growth)
        ops.assign(self.last, loss)


class TupleOf(nn.Cell):  # One network that returns the losses of all, and then the aux of all.
    def __init__(self, networks):
        super().__init__(auto_prefix=False)
        self.networks = nn.CellList(networks, auto_prefix=False)

    def construct(self, *values):
        losses, auxes = (), ()
        for i, network in enumerate(self.networks):
            output = network(values[2 * i], values[2 * i + 1])
            losses += (output[0] if network.has_aux else output,)
            if network.has_aux:
                auxes += output[1:]
        return losses + auxes


def manual_call(step, networks, configuration):
    """Returns a function that makes a call of a ManualStep: it returns what `end` did, the scales and the losses."""

    def value_and_grad_of(i, network):
        def forward(x, slope):
            output = network(x, slope)
            loss, weight = output if network.weighted else (output, None)
            return step.scale(loss, i), loss, weight, step.scale(network.one, i)

        weights = step.parameters[i] if configuration.count > 1 else step.parameters
        return mindspore.value_and_grad(forward, None, weights, has_aux=True)

    parts = [value_and_grad_of(*each) for each in enumerate(networks)]
    one = networks[0].one
    positions = [configuration.positions(i) for i in range(configuration.count)]

    def begin(*inputs):
        inputs = step.begin(*inputs)
        total, losses, scales, grads, weight = 0, (), (), (), None
        for part, (i, j) in zip(parts, positions):
            (_, loss, weight, scale), its_grads = part(inputs[i], inputs[j])
            grads += (its_grads,)
            scales += (scale,)
            total = total + loss  # Not in place: that would change the loss.
            losses += (loss if weight is None else loss / ops.maximum(weight, one),)
        return grads, total, weight, scales, losses

    def end(grads, total, weight, scales, losses):
        return step.end(*grads, loss=total, weight=weight), scales, losses

    def call(inputs, before_end):
        begun = begin(*inputs)
        before_end()
        return end(*begun)

    @mindspore.jit
    def compiled(*inputs):
        return end(*begin(*inputs))

    return call if configuration.cell == "manual" else lambda inputs, _: compiled(*inputs)


class Weights(nn.Cell):  # The weights of a reference, for MindSpore's own optimizer.
    def __init__(self, network):
        super().__init__()
        self.weight, self.bias = (
            Parameter(own.asnumpy().copy(), name=own.name) for own in (network.weight, network.bias)
        )


class ByHand:  # MindSpore's own optimizer, called by hand.
    def __init__(self, name, network):
        with in_mode(mindspore.PYNATIVE_MODE):
            self.own = Weights(network)
            self.optimizer, _ = make_optimizer(name, self.own)

    @property
    def state(self):
        return optimizer_state(self.optimizer)

    def __call__(self, weights, gradients):
        own = (self.own.weight, self.own.bias)
        with in_mode(mindspore.PYNATIVE_MODE):
            for its, value in zip(own, weights):
                ops.assign(its, Tensor(value))
            self.optimizer(tuple(Tensor(gradient.astype(np.float32)) for gradient in gradients))
        return [its.asnumpy().copy() for its in own]


def optimizer_state(optimizer, prefix=""):
    """Returns the values of all Parameters but the weights, by their names without the prefix."""
    weights = [own.name for own in optimizer.parameters]
    held = {its.name: its for its in optimizer.get_parameters() if its.name not in weights}
    return {name.removeprefix(prefix): its.asnumpy().copy() for name, its in held.items()}


class ConfiguredTraining:  # A cell of this configuration. Another seed gives other weights, to load a checkpoint into.
    def __init__(self, configuration, seed=0):
        self.configuration, self.networks, self.monitor = configuration, [], Recording()
        for i in range(configuration.count):
            self.networks.append(Sloped(i, self.networks[-1] if i else None, seed, configuration))
        self.optimizers = [make_optimizer(*pair)[0] for pair in zip(configuration.optimizers, self.networks)]
        loss_scales = [RULES[name][0]() for name in configuration.rules]
        loss_scale = loss_scales if configuration.has_own_scales else loss_scales[0]
        networks, optimizers = self.networks, self.optimizers
        if configuration.count == 1 and configuration.cell != "simultaneous":
            networks, optimizers = networks[0], optimizers[0]
        elif configuration.cell == "tuple":
            networks = TupleOf(networks)
        makes = {"scaled": ls.ScaledTrainOneStepCell, "alternating": ls.AlternatingTrainOneStepCell}
        make = makes.get(
            configuration.cell, ls.ManualStep if configuration.is_manual else ls.SimultaneousTrainOneStepCell
        )
        self.cell = make(networks, optimizers, loss_scale, **self._keywords()).set_train()
        if configuration.is_manual:
            self._call = manual_call(self.cell, self.networks, configuration)

    def _keywords(self):
        configuration = self.configuration
        keywords = dict(configuration.keywords)
        if configuration.is_manual:
            for name in ("max_retries", "weighted", "network_inputs"):
                keywords.pop(name, None)
        if "gradient_transforms" in configuration.own:
            of_each = [[Drifts()] for _ in self.networks]
            keywords["gradient_transforms"] = of_each[0] if configuration.count == 1 else of_each
        if "after_update" in configuration.own:
            of_each = [Halves([network]) for network in self.networks]
            keywords["after_update"] = of_each if configuration.cell == "alternating" else Halves(self.networks)
        if "overflow_detector" in configuration.own:
            keywords["overflow_detector"] = self.detector = LargeGradients()
        if "forward_state" in configuration.own:
            keywords["forward_state"] = [self.networks[0].shared.mean]
        if configuration.condition is not None:
            # Those of networks that take turns are copied.
            keywords["skip_conditions"] = [(CONDITIONS[configuration.condition][0] or HighLoss)()]
        return keywords

    def act(self, action):
        if action:
            getattr(self.cell, action[0])(*action[1:])
        if action == ("flush",) and self.configuration.is_watched:
            self.monitor.after_epoch()

    def call(self, index):  # Makes a call. Returns the arrays that it gives, by name.
        configuration = self.configuration
        values = [Tensor(value) for value in inputs(configuration, index)]
        auxes = ()
        if configuration.is_manual:
            call = configuration.calls[index]
            overflow, scales, losses = self._call(values, lambda: self.act(call.action if call.is_within else ()))
            loss, scale = sum(losses), ops.stack(scales) if configuration.has_own_scales else scales[0]
            outputs = loss, overflow
        else:
            loss, overflow, scale, *others = outputs = self.cell(*values)
            losses = [loss] if configuration.cell == "scaled" else others.pop(0)
            if configuration.keywords.get("has_aux"):
                auxes = others[:1] if configuration.cell == "scaled" else others[0]
                others.pop()
            assert not others
        if configuration.is_watched:
            self.monitor.after_step(*outputs)
        returned = {"loss": loss, "overflow": overflow, "scale": scale, **numbered("loss", losses)}
        for i, aux in enumerate(auxes):
            returned.update(numbered(f"aux {i}", aux))
        return {name: np.array(value.asnumpy()) for name, value in returned.items()}

    def raise_in(self, index):
        """Makes a call in which the forward of a network raises, if it is one in which it does."""
        number = self.configuration.calls[index].raises_in
        if number is not None:
            self.networks[number].raises = True
            with pytest.raises(ValueError, match="on purpose"):
                self.call(index)
            self.networks[number].raises = False

    def watch(self, context):
        if self.configuration.is_watched:
            context.enter_context(self.monitor.watching(self.cell))

    def records(self):
        self.monitor.after_epoch()
        names = ("step_loss", "loss_scale", "next_loss_scale", *RECORDED)
        return of_records(
            (its.grad_norm or (), *(getattr(its, name) for name in names)) for its in self.monitor.records
        )

    def seen(self):  # All that is compared between two calls, by name.
        configuration, cell = self.configuration, self.cell
        alternates = configuration.cell == "alternating"
        counters, held = cell.counters(), cell.parameters_dict()
        seen = {"scales": cell.get_loss_scale()}
        if "overflow_detector" in configuration.own and not alternates:
            seen["asked"] = self.detector.asked
        reasons, overflowed = cell.skip_reasons(), cell.overflowed_parameters()
        for i, (its, why) in enumerate(zip(counters, reasons) if alternates else [(counters, reasons)]):
            seen.update({f"counters {i} {name}": value for name, value in its.items()})
            seen.update({f"reasons {i} {name}": value for name, value in why.items() if name != "not_begun"})
            names = {"spike": ("norm_spike.mean", "norm_spike.steps"), "high loss": ("bound", "last"), None: ()}
            prefix = f"network_{i}." if alternates else configuration.prefix
            for name in names[configuration.condition]:
                seen[f"condition {i} {name.split('.')[-1]}"] = held[prefix + name]
        clips = [configuration.of_network("clip_norm", i) for i in range(configuration.count)]
        if clips != [None] * configuration.count:
            norms = cell.grad_norm()
            seen.update(numbered("norm", norms if isinstance(norms, list) else [norms]))
        averages = {} if configuration.keywords["ema_decay"] is None else dict(cell.ema_parameters())
        for i, network in enumerate(self.networks):
            weights = (network.weight, network.bias)
            seen.update(numbered(f"weight {i}", weights))
            if configuration.is_watched:
                seen.update(numbered(f"overflowed {i}", [its.name in overflowed for its in weights]))
            seen.update(numbered(f"bank {i}", [its for bank in (network.own, network.shared) for its in bank.values]))
            of_optimizer = f"optimizer_{i}." if configuration.count > 1 else ""
            its = optimizer_state(self.optimizers[i], configuration.prefix + of_optimizer)
            seen.update({f"optimizer {i} {name}": value for name, value in its.items()})
            if weights[0].name in averages:
                seen.update(numbered(f"average {i}", [averages.pop(own.name) for own in weights]))
        assert not averages
        return {name: its.asnumpy().copy() if isinstance(its, Tensor) else its for name, its in seen.items()}


def compared(training):  # The comparison of a training with a reference.
    configuration = training.configuration
    weights = [[its.asnumpy().copy() for its in (each.weight, each.bias)] for each in training.networks]
    optimizers = [ByHand(*pair) for pair in zip(configuration.optimizers, training.networks)]
    return Comparison(training, Reference(configuration, weights, optimizers))


def resumed(configuration, cell, way):  # A new training that resumes from the cell's state.
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
    """Makes all calls, and compares after each. From `resume_at` on, a second cell resumes from a checkpoint, and must
    give and hold the same, bit for bit; its monitor begins then."""
    training = ConfiguredTraining(configuration)
    with contextlib.ExitStack() as watching:
        _make_calls(training, compared(training), watching)


def _make_calls(training, comparison, watching):
    configuration, second = training.configuration, None
    training.watch(watching)
    for index, call in enumerate(configuration.calls):
        for its in (training, second) if second is not None else (training,):
            its.raise_in(index)
        if index == configuration.resume_at:
            second = resumed(configuration, training.cell, configuration.resume)
        if call.raises_in is None:  # What the networks before have done, is seen after the call.
            comparison.act(call.action_before)
        if second is not None:
            second.act(call.action_before)
            if index == configuration.resume_at:
                second.watch(watching)
        returned = comparison.call(index)
        if second is not None:
            its_returned = second.call(index)
            # What a call returned before it was saved within it, is not saved.
            if index > configuration.resume_at or call.raises_in is None:
                assert changed(its_returned, returned) == set()
            assert changed(state(second.cell), state(training.cell)) == set()
    comparison.finish()
    if second is not None and configuration.is_watched:
        seen = second.records()
        wanted = comparison.reference.records(len(second.monitor.records))
        compare(seen, wanted, configuration.is_exact)
