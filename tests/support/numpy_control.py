"""
A plain NumPy control of the training cells: what the public contract says about accumulation, clipping, moving averages
and the loss scale, written down in the most obvious way, in float64, for linear models under Momentum.
"""

import numpy as np

LEARNING_RATE = 0.1
MOMENTUM = 0.9

# The control computes in float64, the cells in float32. Each of their operations rounds to 2**-24 = 6e-8 of values of
# the order of 1; some 20 windows of some 20 roundings each, that add up like a random walk, stay well below 1e-5. A
# forgotten or doubled micro-step, division, clip or average is off by 1e-2 or more.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


class DynamicLaw:
    """
    The law of DynamicLossScale with `scale_factor=2` and `hysteresis=1`.

    In the contract's words: an overflow halves the scale, down to 1; `window` clean steps in a row double it, up to
    2**24.
    """

    def __init__(self, scale, window):
        self.scale, self.window, self.clean = float(scale), window, 0

    def step(self, overflow):
        if overflow:
            self.clean = 0
            self.scale = max(self.scale / 2, 1.0)
        else:
            self.clean += 1
            if self.clean == self.window:
                self.scale = min(self.scale * 2, 2.0**24)
                self.clean = 0


class FixedLaw:
    """The law of FixedLossScale."""

    def __init__(self, scale):
        self.scale = float(scale)

    def step(self, overflow):
        pass


class LinearControl:
    """
    The mean squared error of `x @ (weight + others) - y` and its gradient by `weight`, under Momentum.

    Args:
        weight (array): Of shape (features, 1).
        others (tuple[LinearControl]): Networks whose weights, as they are, this one adds to its own.
        clip_norm, clip_value, ema_decay (float): As in the contract.
        learning_rates (list): One for each applied step; the last holds on.
    """

    def __init__(
        self, weight, others=(), clip_norm=None, clip_value=None, ema_decay=None, learning_rates=(LEARNING_RATE,)
    ):
        self.weight = np.array(weight, np.float64)
        self.others = others
        self.clip_norm, self.clip_value, self.ema_decay = clip_norm, clip_value, ema_decay
        self.learning_rates = learning_rates
        self.velocity = np.zeros_like(self.weight)
        self.ema = self.weight.copy()
        self.applied = 0
        self.grad_norm = 0.0

    def loss_and_gradient(self, x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        with np.errstate(all="ignore"):
            errors = x @ (self.weight + sum(other.weight for other in self.others)) - y
            return np.mean(errors**2), 2 / len(x) * x.T @ errors

    def update(self, gradient):
        if self.clip_norm is not None and self.grad_norm > self.clip_norm:
            gradient = gradient * (self.clip_norm / self.grad_norm)
        if self.clip_value is not None:
            gradient = np.clip(gradient, -self.clip_value, self.clip_value)
        learning_rate = self.learning_rates[min(self.applied, len(self.learning_rates) - 1)]
        self.velocity = MOMENTUM * self.velocity + gradient
        self.weight = self.weight - learning_rate * self.velocity
        self.applied += 1
        if self.ema_decay is not None:
            self.ema = self.ema_decay * self.ema + (1 - self.ema_decay) * self.weight


class VerdictControl:
    """
    Networks that share one loss scale, one window and one verdict.

    Args:
        networks (list[LinearControl]): The networks.
        law (DynamicLaw or FixedLaw): The loss scale's law.
        steps (int): Calls in a window.
    """

    def __init__(self, networks, law, steps=1):
        self.networks, self.law, self.steps = networks, law, steps
        self.counters = {"applied_steps": 0, "skipped_steps": 0, "consecutive_skipped_steps": 0}
        self.gathered = []  # For each call of the present window the gradients of all networks.

    def overflow(self):
        """Whether an overflow is known of in this window."""
        return not all(np.isfinite(gradient).all() for call in self.gathered for gradient in call)

    def call(self, inputs):
        """`inputs` holds each network's. Returns losses, overflow and the scale that was used."""
        scale = self.law.scale
        results = [network.loss_and_gradient(*its) for network, its in zip(self.networks, inputs)]
        self.gathered.append([gradient for _, gradient in results])
        overflow = self.overflow()
        if len(self.gathered) == self.steps:
            self.end_window()
        return [loss for loss, _ in results], overflow, scale

    def end_window(self):
        overflow = self.overflow()
        means = [sum(of_network) / len(of_network) for of_network in zip(*self.gathered)]
        self.gathered = []
        self.law.step(overflow)
        for network, mean in zip(self.networks, means):
            network.grad_norm = np.sqrt(np.sum(mean**2))
        if overflow:
            self.counters["skipped_steps"] += 1
            self.counters["consecutive_skipped_steps"] += 1
        else:
            for network, mean in zip(self.networks, means):
                network.update(mean)
            self.counters["applied_steps"] += 1
            self.counters["consecutive_skipped_steps"] = 0

    def flush(self):
        if self.gathered:
            self.end_window()


class AlternatingControl:
    """
    Networks that step one after the other, each with a scale, windows and a verdict of its own.

    Args:
        phases (list[VerdictControl]): One for each network.
        every (tuple[int]): Network i takes part in the windows k, 2k, 3k, ... with k = every[i].
    """

    def __init__(self, phases, every=None):
        self.phases = phases
        self.every = every or (1,) * len(phases)
        self.steps = phases[0].steps
        self.windows, self.calls = 0, 0
        self.last_losses = [0.0] * len(phases)

    def call(self, inputs):
        """`inputs` holds each network's. Returns the lists of losses, overflows and scales."""
        overflows, scales = [], []
        for i, (phase, its) in enumerate(zip(self.phases, inputs)):
            if (self.windows + 1) % self.every[i] == 0:
                (self.last_losses[i],), overflow, scale = phase.call([its])
            else:
                overflow, scale = False, phase.law.scale
            overflows.append(overflow)
            scales.append(scale)
        self.calls += 1
        if self.calls == self.steps:
            self._end_window()
        return list(self.last_losses), overflows, scales

    def _end_window(self):
        self.windows, self.calls = self.windows + 1, 0

    def flush(self):
        if self.calls:
            for phase in self.phases:
                phase.flush()
            self._end_window()
