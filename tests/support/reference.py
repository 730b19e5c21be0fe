"""The training cells of the public contract, in plain NumPy: update rules of the loss scale, attempts, cycles, overflow
checks, updates, moving averages and counters. The networks' computations and the optimizers are given.

It is written to be obvious: all state is in attributes, and a step that does not happen is restored from a copy."""

import dataclasses

import numpy as np


class FixedRule:  # The update rule of FixedLossScale, and of no loss scale.
    # Whether it stands still if the forward was not finite.
    is_patient = False

    def __init__(self, scale):
        self.scale = float(scale)

    def next(self, scale, overflow):  # The scale after a step that used `scale`.
        return scale


class ScheduledRule(FixedRule):  # The update rule of ScheduledLossScale.
    def __init__(self, milestone, scales):
        super().__init__(scales[0])
        self.starts = dict(zip(milestone, scales[1:]))
        self.steps = 0

    def next(self, scale, overflow):
        self.steps += 1
        return self.starts.get(self.steps, scale)


class DynamicRule:  # The update rule of DynamicLossScale, in the contract's words.
    def __init__(
        self, scale, scale_window, *, factor=2.0, backoff=0.5, hysteresis=1, low=1.0, high=2.0**24, is_patient=False
    ):
        self.scale, self.scale_window, self.factor, self.backoff = float(scale), scale_window, factor, backoff
        self.hysteresis, self.low, self.high, self.is_patient = hysteresis, low, high, is_patient
        self.clean = self.bad = 0

    def next(self, scale, overflow):
        if overflow:
            self.clean = 0
            self.bad += 1
            if self.bad == self.hysteresis:
                scale, self.bad = max(scale * self.backoff, self.low), 0
        else:
            self.bad = 0
            self.clean += 1
            if self.clean == self.scale_window:
                scale, self.clean = min(scale * self.factor, self.high), 0
        return scale

    def step(self, overflow):
        self.scale = self.next(self.scale, overflow)

    def can_back_off(self, scale):
        return self.low < scale


class SpikeRule:  # The rule of NormSpike.
    def __init__(self, max_norm, z_score, window):
        self.max_norm, self.z_score, self.window = max_norm, z_score, window
        self.mean = self.variance = 0.0
        self.steps, self.has_observed = 0, False

    def skips(self, loss, norm):
        # A NaN is above everything. Before any norm was observed, no finite one is.
        usual = self.mean + self.z_score * np.sqrt(self.variance) if self.has_observed else np.finfo(np.float32).max
        return not norm <= self.max_norm or (self.steps >= self.window and not norm <= usual)

    def observe(self, loss, norm):
        self.steps += 1
        if not norm <= 1e18:
            return
        if not self.has_observed:
            self.mean, self.has_observed = norm, True
        share, distance = 1 / self.window, norm - self.mean
        self.mean += share * distance
        self.variance = (1 - share) * (self.variance + share * distance**2)


class HighLossRule:
    """The rule of a user's own condition: the loss is above a bound, which grows with each step that is applied."""

    def __init__(self, bound, growth):
        self.bound, self.growth, self.last = bound, growth, 0.0

    def skips(self, loss, norm):
        return loss > self.bound

    def observe(self, loss, norm):
        self.bound += self.growth
        self.last = loss


@dataclasses.dataclass
class State:  # What a forward writes. If the steps of other networks reach it, too, each call is undone by itself.
    value: object = None
    is_shared: bool = False


@dataclasses.dataclass
class Run:
    """The results of a network: its gradients are those that reach the cell, unscaled: those of the sum over `weight`
    things, of which `loss` is the mean. What it wrote, for each of the network's states, is in `written`."""

    loss: float
    gradients: list
    written: tuple
    forward_overflowed: bool
    weight: float
    aux: tuple

    @property
    def has_weight(self):
        """Whether the weight is possible. With another one, nothing is trained, as if the loss was not finite."""
        return 0 <= self.weight < np.inf

    @property
    def has_loss(self):
        return bool(np.isfinite(self.loss)) and self.has_weight

    @property
    def has_gradients(self):
        return self.has_weight and all(self.finite)

    @property
    def finite(self):
        """Whether each gradient is finite."""
        return [bool(np.isfinite(gradient).all()) for gradient in self.gradients]


def mean_loss(runs):
    """Returns the sum of a network's losses, divided by that of their weights if there is anything in the mean."""
    # A loss without weight was not divided by it.
    return sum(run.loss * (run.weight or 1) for run in runs) / (sum(run.weight for run in runs) or 1)


def norm_of(gradients):
    flat = np.concatenate([gradient.ravel() for gradient in gradients]).astype(np.float64)
    return float(np.sqrt(np.sum(flat**2)))


class NetworkReference:
    """A network with its optimizer and what else an update changes. A subclass defines `run(inputs, scale)`, which
    returns a Run and changes nothing.

    Args:
        weights (list[array]): One array for each weight.
        optimizer (callable): Returns the new weights, given the weights and their gradients.
        states (Sequence[State]): What its forward writes.
        clip_norm, clip_value, ema_decay (float): As in the contract."""

    def __init__(self, weights, optimizer, states, clip_norm, clip_value, ema_decay):
        self.weights, self.optimizer, self.states = weights, optimizer, states
        self.clip_norm, self.clip_value, self.ema_decay = clip_norm, clip_value, ema_decay
        self.averages = [weight.copy() for weight in weights]
        self.grad_norm = 0.0

    def transform(self, gradients, steps):  # The gradients as transformed in a step that follows so many applied ones.
        return gradients

    def mean(self, of_calls, weights):  # The gradients of a step, given those of its calls and their weights.
        if not of_calls:
            return [np.zeros_like(weight) for weight in self.weights]
        # If there is nothing in the mean, the sums are 0.
        total = sum(weights) or 1
        return [sum(of_weight) / of_weight[0].dtype.type(total) for of_weight in zip(*of_calls)]

    def after_update(self, weights):  # The weights as a cell of the user's own leaves them after the optimizer.
        return weights

    def measure(self, gradients):
        self.grad_norm = norm_of(gradients)

    def update(self, gradients):
        if self.clip_norm is not None and self.grad_norm > self.clip_norm:
            ratio = np.float32(self.clip_norm / self.grad_norm)
            gradients = [gradient * ratio for gradient in gradients]
        if self.clip_value is not None:
            gradients = [np.clip(gradient, -self.clip_value, self.clip_value) for gradient in gradients]
        self.weights = self.after_update(self.optimizer(self.weights, gradients))
        if self.ema_decay is not None:
            decay, rest = np.float32(self.ema_decay), np.float32(1 - self.ema_decay)
            self.averages = [decay * average + rest * weight for average, weight in zip(self.averages, self.weights)]


class StepReference:
    """Networks that share one cycle, one overflow check and one update.

    Args:
        networks (list[NetworkReference]): The networks.
        rules (list): One update rule if they share a loss scale, or one for each.
        steps (int): Calls in a cycle.
        max_retries (int): How many attempts after the first a call may have.
        checks (bool): Whether overflows are checked.
        skip_conditions (Sequence): The rules of its conditions.
        has_one_loss (bool): Whether its networks have no losses of their own, but the step has their sum.
        drops_calls (bool): Whether a call that overflowed is dropped, and not its whole cycle.

    An `overflow_detector` that is assigned tells whether gradients overflowed that are all finite. How often it was
    asked, in steps that were applied, is in `asked`."""

    overflow_detector = staticmethod(lambda gradients: False)

    def __init__(self, networks, rules, steps, max_retries, checks, skip_conditions, has_one_loss, drops_calls):
        self.networks, self.rules, self.steps, self.conditions = networks, rules, steps, skip_conditions
        self.has_one_loss, self.drops_calls = has_one_loss, drops_calls
        self.states = list({id(state): state for network in networks for state in network.states}.values())
        self.asked = State(0)
        self.states.append(self.asked)
        self.max_retries, self.checks = max_retries, checks
        # The norms, None where they are not measured, the mean loss, and whether it is skipped, of the step that has
        # just ended.
        self.ended = None
        self.counters = {"applied_steps": 0, "skipped_steps": 0, "consecutive_skipped_steps": 0}
        if max_retries:
            self.counters["retries"] = 0
        if drops_calls:
            self.counters["dropped_calls"] = 0
        # Why steps were skipped, and for each network and gradient, whether it was not finite in the last one that was.
        self.reasons = {"loss": 0, "forward_state": 0, "gradients": 0, "detector": 0}
        if skip_conditions:
            self.reasons["condition"] = self.counters["skipped_by_condition"] = 0
        self.not_finite = [[False] * len(network.weights) for network in networks]
        self._begin_cycle()

    def _begin_cycle(self):
        self.kept = []  # The runs of the networks, for each call that was not dropped.
        self.calls = 0
        # Whether a loss, what a forward wrote, and which gradients were not finite in a call.
        self.causes = {"loss": False, "forward_state": False}
        self.not_finite_so_far = [[False] * len(network.weights) for network in self.networks]
        self.overflowed = [False] * len(self.rules)
        # For each rule, whether the forward of a call was not finite.
        self.forward_not_finite = list(self.overflowed)
        # For each rule, whether a call overflowed whose forward was finite, or for which the rule does not stand still.
        self.must_back_off = list(self.overflowed)
        self.is_set = [False] * len(self.rules)

    @property
    def lost(self):  # Whether it is known that this cycle is skipped.
        return any(self.overflowed) and not self.drops_calls

    def set_loss_scale(self, i, value, in_call=False):  # Sets a scale. Within a step, it is for the next one.
        self.rules[i].scale = float(value)
        self.is_set[i] = in_call or self.calls > 0

    def present_scales(self):
        return [rule.scale for rule in self.rules]

    def _values(self):
        return [state.value for state in self.states]

    def call(self, inputs, before_end=lambda: None):
        """Makes a call; `inputs` has each network's. Returns the losses, the overflow, the scales and each aux."""
        self.before_call = self._values()
        if not self.calls:
            self.scales = self.present_scales()
            self.before_cycle = self.before_call
        left = self.max_retries
        runs, flags = self._try(inputs)
        while left and self._can_be_mended(runs, flags):
            self._back_off(flags)
            left -= 1
            runs, flags = self._try(inputs)
        before_end()
        used = list(self.scales)
        self.calls += 1
        self._remember(runs, flags)
        overflow = self.lost
        if self.drops_calls and any(flags):
            overflow = True
            self._undo_call()
            self.counters["dropped_calls"] += 1
        else:
            self.kept.append(runs)
        if self.calls == self.steps:
            overflow = self._end_cycle()
        elif self.lost:
            self._undo()
        return [run.loss for run in runs], overflow, used, [run.aux for run in runs]

    def _undo_call(self):
        for state, value in zip(self.states, self.before_call):
            state.value = value

    def _undo(self):
        """Undoes the last call where the steps of other networks reach what it wrote, and else the cycle so far."""
        for state, of_call, of_cycle in zip(self.states, self.before_call, self.before_cycle):
            state.value = of_call if state.is_shared else of_cycle

    def _remember(self, runs, flags):  # Remembers of a call what overflowed, and whether its forward was not finite.
        losses = [not run.has_loss for run in runs]
        self.causes["loss"] |= any(losses)
        self.causes["forward_state"] |= any(run.forward_overflowed for run in runs)
        for so_far, run in zip(self.not_finite_so_far, runs):
            so_far[:] = [before or not finite for before, finite in zip(so_far, run.finite)]
        losses = [any(losses)] * len(losses) if self.has_one_loss else losses
        in_a_forward = any(run.forward_overflowed for run in runs)
        for i, overflowed in enumerate(flags):
            if len(flags) == 1:
                not_finite = any(losses) or in_a_forward
            else:
                # Whose forward wrote it is not known: it counts where nothing else tells whose overflow it is.
                not_finite = losses[i] or (in_a_forward and all(flags) and not any(losses))
            self.overflowed[i] |= overflowed
            self.forward_not_finite[i] |= not_finite
            self.must_back_off[i] |= overflowed and not (self.rules[i].is_patient and not_finite)

    def _try(self, inputs):
        """Runs the networks. Returns the runs, and for each update rule whether its gradients overflowed."""
        of_one = len(self.rules) == 1
        scales = self.scales * len(self.networks) if of_one else self.scales
        runs = []
        for network, its, scale in zip(self.networks, inputs, scales):
            runs.append(network.run(its, scale))
            for state, value in zip(network.states, runs[-1].written):
                state.value = value
        self.asked.value += self.checks
        not_finite = [not run.has_gradients for run in runs]
        untold = any(run.forward_overflowed or self.overflow_detector(run.gradients) for run in runs)
        if not self.checks:
            flags = [False] * len(self.rules)
        elif of_one:
            flags = [any(not_finite) or untold]
        else:
            # If no gradient tells whose overflow it was, all count.
            flags = not_finite if any(not_finite) else [untold] * len(self.rules)
        return runs, flags

    def _can_be_mended(self, runs, flags):
        """Returns whether a lower scale may help: not if a forward overflowed or the cycle is lost already."""
        hopeless = any(run.forward_overflowed or not run.has_loss for run in runs) or self.lost
        overflowed = [(rule, scale) for rule, scale, flag in zip(self.rules, self.scales, flags) if flag]
        return bool(overflowed) and not hopeless and all(rule.can_back_off(scale) for rule, scale in overflowed)

    def _back_off(self, flags):
        """Undoes the try. The rules of those that overflowed see an overflow; the cycle goes on at the lower scale."""
        self._undo_call()
        self.counters["retries"] += 1
        for i, flag in enumerate(flags):
            if flag:
                self.scales[i] = self._step_rule(i, overflow=True)

    def _step_rule(self, i, overflow):
        next_scale = self.rules[i].next(self.scales[i], overflow)
        # One that was set since the step began stays.
        if not self.is_set[i]:
            self.rules[i].scale = next_scale
        return next_scale

    def _end_cycle(self):  # Ends a cycle. Returns whether it is skipped.
        # In a cycle it is asked about the mean, too.
        self.asked.value += self.checks and self.steps > 1
        means = []
        of_networks = [[runs[i] for runs in self.kept] for i in range(len(self.networks))]
        for network, runs in zip(self.networks, of_networks):
            mean = network.mean([run.gradients for run in runs], [run.weight for run in runs])
            means.append(network.transform(mean, self.counters["applied_steps"]))
            network.measure(means[-1] if self.kept else [np.array(np.nan)])
        loss = sum(map(mean_loss, of_networks))
        norm = norm_of([gradient for its in means for gradient in its])
        measures = [network.clip_norm is not None for network in self.networks]
        norms = [network.grad_norm if its else None for network, its in zip(self.networks, measures)]
        lost = self.lost or not self.kept
        by_condition = not lost and any(condition.skips(loss, norm) for condition in self.conditions)
        skipped = lost or by_condition
        self.ended = norms if any(measures) else (), (loss if self.kept else None), skipped
        for i, backs_off in enumerate(self.must_back_off):
            # A call that is dropped does not make a rule stand still that must back off for another one.
            stands_still = self.lost and self.rules[i].is_patient and self.forward_not_finite[i]
            if backs_off and not stands_still:
                self._step_rule(i, overflow=True)
            elif not any(self.overflowed) and not by_condition:
                # Where any rule's gradients overflowed, the others' scales do not change.
                self._step_rule(i, overflow=False)
        if skipped:
            self._undo()
            self._count_reason(by_condition)
            self.counters["skipped_steps"] += 1
            self.counters["consecutive_skipped_steps"] += 1
        else:
            for network, mean in zip(self.networks, means):
                network.update(mean)
            for condition in self.conditions:
                condition.observe(loss, norm)
            self.counters["applied_steps"] += 1
            self.counters["consecutive_skipped_steps"] = 0
        self._begin_cycle()
        return skipped

    def _count_reason(self, by_condition):
        self.not_finite = self.not_finite_so_far
        reasons = [*self.causes, *["gradients"] * any(map(any, self.not_finite)), "detector"]
        reason = next(name for name in reasons if self.causes.get(name, True))
        self.reasons["condition" if by_condition else reason] += 1
        if by_condition:
            self.counters["skipped_by_condition"] += 1

    def flush(self):
        if self.calls:
            self.before_call = self._values()
            self._end_cycle()

    def discard(self):
        if self.calls:
            for state, value in zip(self.states, self.before_cycle):
                # What the steps of other networks reach stays, and where no step is ever skipped, all that was written.
                state.value = state.value if state.is_shared or not (self.checks or self.conditions) else value
            if self.drops_calls:
                self.counters["dropped_calls"] -= self.calls - len(self.kept)
            self._begin_cycle()


class AlternatingReference:
    """Networks that step one after the other, each with its own scale, cycles and overflow check.

    Args:
        phases (list[StepReference]): One for each network.
        every (tuple[int]): Network i takes part in the cycles k, 2k, 3k, ... with k = every[i]."""

    def __init__(self, phases, every=None):
        self.phases, self.steps = phases, phases[0].steps
        self.every = every or (1,) * len(phases)
        self.cycles = self.calls = 0
        self.last_losses = [0.0] * len(phases)

    def takes_part(self, i):  # Whether network i takes part in this cycle.
        return (self.cycles + 1) % self.every_in_cycle[i] == 0

    def call(self, inputs):
        """Makes a call; `inputs` has each network's. Returns the lists of losses, overflows, scales and aux."""
        if self.calls == 0:
            self.every_in_cycle = self.every
        self.losses, others = list(self.last_losses), []
        for i, (phase, its) in enumerate(zip(self.phases, inputs)):
            overflow, scale, aux = False, phase.rules[0].scale, ()
            if self.takes_part(i):
                (self.losses[i],), overflow, (scale,), (aux,) = phase.call([its])
            others.append((overflow, scale, aux))
        self.calls += 1
        if self.calls == self.steps:
            self._end_cycle()
        return (self.losses, *map(list, zip(*others)))

    def _end_cycle(self):
        for i, phase in enumerate(self.phases):
            # The loss of a turn that was skipped does not count.
            if self.takes_part(i) and not phase.counters["consecutive_skipped_steps"]:
                self.last_losses[i] = self.losses[i]
        self.cycles, self.calls = self.cycles + 1, 0

    def flush(self):
        if self.calls:
            for phase in self.phases:
                phase.flush()
            self._end_cycle()

    def discard(self):
        for phase in self.phases:
            phase.discard()
        self.calls = 0
