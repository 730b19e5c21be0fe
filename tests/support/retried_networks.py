"""Networks whose gradients overflow from a loss scale on that the batch chooses, and what becomes of them then."""

import copy

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, InputGradient

LEARNING_RATE = 2.0**-10
FLOAT16_MAX = 65504.0


class Slope(nn.Cell):
    """
    The gradient of its weights is `slope`, in float16. Its forward counts itself, and moves BatchNorm's statistics.
    """

    def __init__(self, name="slope"):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(3, np.float32)), name=f"{name}.weight")
        self.calls = Parameter(Tensor(0, mstype.int32), name=f"{name}.calls", requires_grad=False)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.norm.update_parameters_name(f"{name}.")
        self.one = Tensor(1, mstype.int32)

    def construct(self, x, slope):
        ops.assign(self.calls, self.calls + self.one)
        product = self.weight.astype(mstype.float16) * slope.astype(mstype.float16)
        return product.astype(mstype.float32).sum() + ops.stop_gradient(self.norm(x)).sum()


class TwoSlopes(nn.Cell):
    """One network with the losses of two."""

    def __init__(self, first, second):
        super().__init__(auto_prefix=False)
        self.first, self.second = first, second

    def construct(self, x, slope, other):
        return self.first(x, slope), self.second(x, other)


class Penalised(nn.Cell):
    """Its loss holds a gradient that is computed at the scale, and is infinite in float16 from some scale on."""

    def __init__(self, loss_scale, name="slope"):
        super().__init__()
        self.inner = Slope(name)
        self.gradient = InputGradient(_Steep(), loss_scale)

    def construct(self, x, slope):
        return self.inner(x, slope) + self.gradient(x).mean() * self.inner.weight.sum()


class _Steep(nn.Cell):
    def construct(self, x):
        return (x.astype(mstype.float16) * 16.0).sum()


def inputs(*slopes, seed=0):
    """A batch, and the slopes of the networks that it is for."""
    x = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    return Tensor(x), *(Tensor(np.float32(slope)) for slope in slopes)


def random_slopes(seed, *shape, odd=0.05):
    """Powers of two, of which a scale of 2**16 / slope overflows; now and then NaN, or too large for any scale."""
    rng = np.random.default_rng(seed)
    values = 2.0 ** rng.integers(-3, 7, shape)
    values[rng.random(shape) < odd] = np.nan
    values[rng.random(shape) < odd] = 2.0**15
    return values.tolist()


def loss_scale(scale, window, hysteresis=1, low=1.0):
    """Of the same arguments as `Law`."""
    return DynamicLossScale(scale, scale_window=window, hysteresis=hysteresis, min_loss_scale=low)


def overflows(scale, slope):
    """Whether float16 can't hold the gradient, or the scale itself."""
    return not (scale <= FLOAT16_MAX and abs(scale * slope) <= FLOAT16_MAX)


class Law:
    """DynamicLossScale's, in the contract's words."""

    def __init__(self, scale, window, hysteresis=1, low=1.0):
        self.scale, self.window, self.hysteresis, self.low = float(scale), window, hysteresis, low
        self.clean = self.bad = 0

    def step(self, overflow):
        if overflow:
            self.clean = 0
            self.bad += 1
            if self.bad == self.hysteresis:
                self.scale, self.bad = max(self.scale / 2, self.low), 0
        else:
            self.bad = 0
            self.clean += 1
            if self.clean == self.window:
                self.scale, self.clean = min(self.scale * 2, 2.0**24), 0

    def can_back_off(self):
        return max(self.scale / 2, self.low) < self.scale


class RetryControl:
    """The law, the counters and the weights of one network, by the definition of a retry."""

    def __init__(self, law, max_retries, steps=1):
        self.law, self.max_retries, self.steps = law, max_retries, steps
        self.applied_steps = self.skipped_steps = self.consecutive_skipped_steps = self.retries = 0
        self.weight, self.forwards = 1.0, 0
        self.window, self.lost = [], False

    def call(self, slope):
        """The call's overflow as far as is known, and the scale of its last try."""
        before, tries = copy.deepcopy(self.law), self.max_retries
        while True:
            scale = self.law.scale
            overflow = overflows(scale, slope)
            if not (overflow and np.isfinite(slope) and tries and self.law.can_back_off() and not self.lost):
                break
            self.law.step(True)
            self.retries += 1
            tries -= 1
        if overflow:
            self.law = before
        self.lost |= overflow
        self.window.append(slope)
        lost = self.lost
        if len(self.window) == self.steps:
            self.end()
        return lost, scale

    def end(self):
        self.law.step(self.lost)
        if self.lost:
            self.skipped_steps += 1
            self.consecutive_skipped_steps += 1
        else:
            self.applied_steps += 1
            self.consecutive_skipped_steps = 0
            self.weight -= LEARNING_RATE * float(np.mean(self.window))
            self.forwards += len(self.window)
        self.window, self.lost = [], False

    def counters(self):
        names = ("applied_steps", "skipped_steps", "consecutive_skipped_steps", "retries")
        return {name: getattr(self, name) for name in names}
