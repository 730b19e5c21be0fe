"""The reference of a drawn configuration, in plain NumPy, and what it is compared in."""

import numpy as np

from support.configurations import BAD_WEIGHTS, CONDITIONS, GRADIENT_BOUND, RULES, inputs
from support.reference import AlternatingReference, NetworkReference, Run, State, StepReference

# There are some 12 steps of some 20 roundings each, by float32's 2**-24 = 6e-8 of numbers of the order of 1. A
# forgotten or doubled call, division, clip or average is off by 1e-2 or more.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
FLOAT16_MAX = 65504.0
# What is compared to within ROUNDING always, since sums have different orders, and only where float32 rounds more.
_SUMS, _ROUNDED = ("loss", "norm", "condition"), ("weight", "average", "optimizer", "aux")


def finite_or_nan(value):  # The value as an array. Which infinity it is, or NaN, does not matter.
    value = np.asarray(value, np.float64)
    return np.where(np.isfinite(value), value, np.nan)


def compare(seen, wanted, is_exact):  # Compares two dicts of values, by names whose first word tells how.
    assert seen.keys() == wanted.keys(), f"only in one: {sorted(seen.keys() ^ wanted.keys())}"
    for name, value in seen.items():
        word, its = name.split()[0], wanted[name]
        if value is not None and its is not None and word in _SUMS:
            np.testing.assert_allclose(finite_or_nan(value), finite_or_nan(its), **ROUNDING, err_msg=name)
        elif word in _ROUNDED and not is_exact:
            np.testing.assert_allclose(value, its, **ROUNDING, err_msg=name)
        else:
            np.testing.assert_array_equal(value, its, err_msg=name)


class Comparison:
    """Compares a training with its reference in all that each call does."""

    def __init__(self, training, reference):
        self.training, self.reference = training, reference

    def act(self, action):
        self.training.act(action)
        self.reference.act(action)
        self._compare(self.training.seen(), self.reference.seen())

    def call(self, index):  # Makes one call of both. Returns what the training gave.
        wanted = self.reference.call(index)
        returned = self.training.call(index)
        if self.reference.configuration.calls[index].bad_weight is not None:
            # What such a loss is divided by is not promised.
            for name in [name for name in wanted if name.startswith("loss")]:
                wanted[name] = returned[name]
        self._compare(returned, wanted)
        self._compare(self.training.seen(), self.reference.seen())
        return returned

    def finish(self):
        """Compares the records of a monitor, which were read at the end, or at a flush."""
        if self.reference.configuration.is_watched:
            self._compare(self.training.records(), self.reference.records())

    def _compare(self, seen, wanted):
        compare(seen, wanted, self.reference.configuration.is_exact)


RECORDED = ("skipped", "applied_steps", "skipped_steps", "consecutive_skipped_steps", "dropped_calls")


def of_records(records):  # A dict of what of a monitor's records is compared: norms, mean losses, scales, and RECORDED.
    values = {}
    for i, (norms, loss, scale, next_scale, *others) in enumerate(records):
        values.update(numbered(f"norm of record {i}", norms))
        values.update({f"loss of record {i}": loss, f"scales of record {i}": f"{scale}, then {next_scale}"})
        values.update({f"{name} of record {i}": value for name, value in zip(RECORDED, others)})
    return values


def numbered(name, values):  # A dict with a name for each value.
    return {f"{name} {i}": value for i, value in enumerate(values)}


class SlopedReference(NetworkReference):  # The network in NumPy, in float32.
    def __init__(self, configuration, i, earlier, weights, optimizer):
        names = ("clip_norm", "clip_value", "ema_decay")
        keywords = {name: configuration.of_network(name, i) for name in names}
        zeros = np.zeros(2, np.float32), 0
        # Its own, and that which all networks share.
        states = [State(zeros), State(zeros) if earlier is None else earlier.states[1]]
        super().__init__(weights, optimizer, states, **keywords)
        self.earlier, self.own = earlier, configuration.own
        self.weighted, self.has_aux = (configuration.of_network(name, i) for name in ("weighted", "has_aux"))

    def transform(self, gradients, steps):
        drift = np.float32((steps + 1) * 2.0**-6 if "gradient_transforms" in self.own else 0)
        return [gradient + drift for gradient in gradients]

    def after_update(self, weights):
        return [weights[0], np.float32(0.5) * weights[1]] if "after_update" in self.own else weights

    def run(self, values, scale):
        x, slope = values
        weight = self.weights[0] + self.weights[1]
        if self.earlier is not None:
            weight = weight + self.earlier.weights[0]
        errors = weight - x[0]
        number = np.float32(weight_of(x[0, 0]) if self.weighted else 1.0)
        holds = scale * number <= FLOAT16_MAX and abs(scale * number * slope) <= FLOAT16_MAX
        written = []
        for state in self.states:
            mean, count = state.value
            written.append((np.float32(0.5) * mean + np.float32(0.5) * x[1], count + 1))
        was_finite, is_finite = (np.isfinite(mean).all() for mean in (self.states[0].value[0], written[0][0]))
        # A loss of no things is its zeros, times errors, and 1.
        loss = np.float32(0.25) * (np.sum(errors**2) if number else np.sum(0 * errors) + np.float32(1.0))
        return Run(
            loss=loss if np.isfinite(slope) else np.nan,
            gradients=[
                number * (slope + np.float32(0.5) * errors) if holds else np.full(2, np.inf * number * slope),
                number * np.float32(0.5) * errors,
            ],
            written=tuple(written),
            forward_overflowed=bool(was_finite and not is_finite),
            weight=number,
            aux=(self.weights[0], errors) if self.has_aux else (),
        )


def weight_of(x):  # Of how many things the loss is a sum; a weight that is impossible where `inputs` says so.
    if abs(x) > 2:
        return BAD_WEIGHTS[float(x)]
    return float(x > -1.5) + float(x > 0)


def is_large(gradients):
    return any((np.abs(gradient) > GRADIENT_BOUND).any() for gradient in gradients)


class Reference:
    """The reference of a configuration, given its networks' first weights, and optimizers for NetworkReferences."""

    def __init__(self, configuration, weights, optimizers):
        self.configuration, self._records = configuration, []
        self.networks = []
        for i, each in enumerate(zip(weights, optimizers)):
            self.networks.append(SlopedReference(configuration, i, self.networks[-1] if i else None, *each))
        settings = (configuration.steps, configuration.keywords["max_retries"], configuration.checks)
        self.alternates = configuration.cell == "alternating"
        drops_calls = bool(configuration.keywords.get("drop_overflowed_calls"))
        keywords = {"has_one_loss": configuration.is_manual, "drops_calls": drops_calls}
        names = configuration.rules
        if self.alternates:
            # Each network reaches the earlier ones.
            for state in (*(network.states[0] for network in self.networks[:-1]), self.networks[0].states[1]):
                state.is_shared = True
            names = names if configuration.has_own_scales else names * configuration.count
            steps = [([network], [RULES[name][1]()]) for network, name in zip(self.networks, names)]
        else:
            steps = [(self.networks, [RULES[name][1]() for name in names])]
        condition = configuration.condition
        conditions = [[] if condition is None else [CONDITIONS[condition][1]()] for _ in steps]
        self.phases = [
            StepReference(*step, *settings, **keywords, skip_conditions=its) for step, its in zip(steps, conditions)
        ]
        for phase in self.phases if "overflow_detector" in configuration.own else ():
            phase.overflow_detector = is_large
        self.whole = self.phases[0]
        if self.alternates:
            self.whole = AlternatingReference(self.phases, configuration.keywords.get("every"))

    def act(self, action):
        name = action[0] if action else None
        if name in ("flush", "discard"):
            has_calls = self.whole.calls > 0
            getattr(self.whole, name)()
            if name == "flush" and has_calls:
                self._record([phase.scales if phase.ended else phase.present_scales() for phase in self.phases])
        elif name == "set_every":
            self.whole.every = action[1]
        elif name == "set_loss_scale":
            self._set_loss_scale(action[1])

    def _set_loss_scale(self, values, **keywords):
        rules = [(phase, i) for phase in self.phases for i in range(len(phase.rules))]
        for (phase, i), value in zip(rules, values if isinstance(values, list) else [values]):
            phase.set_loss_scale(i, value, **keywords)

    @np.errstate(all="ignore")
    def call(self, index):  # Makes a call. Returns what the cell must return, by name.
        configuration = self.configuration
        values = inputs(configuration, index)
        its = [[values[j] for j in configuration.positions(i)] for i in range(configuration.count)]
        call, keywords = configuration.calls[index], {}
        if call.is_within:
            keywords["before_end"] = lambda: self._set_loss_scale(call.action[1], in_call=True)
        losses, overflow, scales, auxes = self.whole.call(its, **keywords)
        self._record([[scale] for scale in scales] if self.alternates else [scales])
        returned = {"loss": np.sum(losses), "overflow": overflow, "scale": np.float32(self._one_or_each(scales))}
        if configuration.cell == "tuple":
            auxes = [[value for aux in auxes for value in aux]]
        for i, aux in enumerate(auxes):
            returned.update(numbered(f"aux {i}", aux))
        return {**returned, **numbered("loss", losses)}

    def _record(self, used):
        for phase, scales in zip(self.phases, used):
            norms, loss, skipped = phase.ended or ((), None, False)
            shown = ["/".join(map(str, its)) for its in (scales, phase.present_scales())]
            self._records.append(
                (norms, loss, *shown, skipped, *(phase.counters.get(name, 0) for name in RECORDED[1:]))
            )
            phase.ended = None

    def records(self, last=0):  # All, or so many of the last ones.
        return of_records(self._records[-last:])

    def _one_or_each(self, values):
        return values if self.alternates or self.configuration.has_own_scales else values[0]

    def seen(self):  # All that is compared between two calls, by name.
        seen = {"scales": self._one_or_each([scale for phase in self.phases for scale in phase.present_scales()])}
        if "overflow_detector" in self.configuration.own and not self.alternates:
            seen["asked"] = self.whole.asked.value
        for i, phase in enumerate(self.phases):
            seen.update({f"counters {i} {name}": value for name, value in phase.counters.items()})
            seen.update({f"reasons {i} {name}": value for name, value in phase.reasons.items()})
            for condition in phase.conditions:
                names = {"spike": ("mean", "steps"), "high loss": ("bound", "last")}[self.configuration.condition]
                seen.update({f"condition {i} {name}": getattr(condition, name) for name in names})
        not_finite = [its for phase in self.phases for its in phase.not_finite]
        for i, network in enumerate(self.networks):
            seen.update(numbered(f"weight {i}", network.weights))
            if self.configuration.is_watched:
                seen.update(numbered(f"overflowed {i}", not_finite[i]))
            seen.update(numbered(f"bank {i}", [its for state in network.states for its in state.value]))
            seen.update({f"optimizer {i} {name}": value for name, value in network.optimizer.state.items()})
            if network.ema_decay is not None:
                seen.update(numbered(f"average {i}", network.averages))
            if any(each.clip_norm is not None for each in self.networks):
                seen[f"norm {i}"] = None if network.clip_norm is None else network.grad_norm
        return seen
