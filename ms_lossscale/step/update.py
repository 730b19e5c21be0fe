"""What an applied step does: unscale, clip, step the optimizers, and move the averages of weights."""

import math

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale._values import as_float32
from ms_lossscale.step.optimizers import Optimizers

_SMALLEST_NORMAL = 2.0**-126


@gradients.of_one("Tensor", "Tensor", "Tensor")
def _limit(low, high, tensor):
    """Limits each element to at least `low` and at most `high`."""
    return prim.minimum(prim.maximum(tensor, low), high)


@gradients.of_one("Tensor", "Tensor", "Tensor", "Tensor")
def _average(decay, rest, average, value):
    """Sets an average in place to `decay * average + rest * value`."""
    return prim.assign(average, decay * average + rest * prim.cast(value, mstype.float32))


class Clip(nn.Cell):
    """Unscales the gradients of one network, if they are scaled, and clips them by `clip_value` or by their norm."""

    def __init__(self, plan, number, norm):
        super().__init__(auto_prefix=False)
        clip_norm = plan.settings.clip_norm[number]
        clip_value = plan.settings.clip_value[number]
        self.norm = norm
        self._bound = None
        self._low = None
        if clip_value is not None:
            self._low = as_float32(-clip_value)
            self._high = as_float32(clip_value)
        if clip_norm is not None and not math.isinf(clip_norm):
            self._bound = as_float32(clip_norm)
            self._one = as_float32(1.0)
            self._smallest = as_float32(_SMALLEST_NORMAL)

    def construct(self, grads, factor):
        """`factor` unscales the gradients, None if they are unscaled."""
        if self._bound is not None:
            return self._by_norm(grads, factor)
        grads = grads if factor is None else gradients.multiply(grads, factor)
        if self._low is not None:
            grads = gradients.map_each(ops.partial(_limit, self._low, self._high), grads)
        return grads

    def _by_norm(self, grads, factor):
        ratio = prim.div(self._bound, self.norm.root)
        coefficient = prim.minimum(self._one, prim.mul(ratio, self.norm.power))
        last = coefficient if factor is None else prim.mul(coefficient, factor)
        if prim.less(last, self._smallest):
            # In several steps, since float32 would flush their product to zero, and all gradients with it.
            grads = grads if factor is None else gradients.multiply(grads, factor)
            is_tiny = prim.less(coefficient, self._smallest)
            grads = gradients.multiply(grads, prim.select(is_tiny, self.norm.power, self._one))
            last = prim.select(is_tiny, ratio, coefficient)
        # Outside of the branch, a device may make it one kernel with the optimizer.
        return gradients.multiply(grads, last)


class MovingAverage(nn.Cell):
    """
    Computes `ema = decay * ema + (1 - decay) * weight` for one optimizer's weights, in float32. It begins with the
    weights as they are at the first applied update, so also with loaded ones.
    """

    def __init__(self, decay, weights, prefix=""):
        super().__init__(auto_prefix=False)
        self.weights = weights
        self.averages = ParameterTuple(
            Parameter(
                ops.deepcopy(weight).astype(mstype.float32), name=f"{prefix}ema.{weight.name}", requires_grad=False
            )
            for weight in weights
        )
        self._decay = Tensor(decay, mstype.float32)
        self._rest = Tensor(1.0 - decay, mstype.float32)

    def take_weights(self):
        """Takes the present weights."""
        return gradients.assign(self.averages, gradients.cast_like(self.weights, self.averages))

    def construct(self):
        """Updates the averages, after the weights."""
        move = ops.partial(_average, self._decay, self._rest)
        return gradients.map_each(move, self.averages, self.weights)

    def pairs(self):
        """Returns pairs of a weight and its average."""
        return list(zip(self.weights, self.averages))


class Update(nn.Cell):
    """Applies the prepared gradients of a step."""

    def __init__(self, plan, norms):
        super().__init__(auto_prefix=False)
        settings = plan.settings
        self.optimizers = Optimizers(plan.optimizers)
        self.after_update = settings.after_update
        clips = [Clip(plan, i, norm) for i, norm in enumerate(norms.of_network)]
        self.clips = nn.CellList(clips, auto_prefix=False)
        averages = [
            MovingAverage(decay, weights, plan.name_prefix)
            for decay, weights in zip(settings.ema_decay, plan.weights)
            if decay is not None
        ]
        self.averages = nn.CellList(averages, auto_prefix=False)

    def apply(self, grads, factors, is_first):
        """
        Updates the weights. `factors` unscales the gradients of each network, None if they are unscaled; `is_first`
        tells whether no step was applied before. Returns what to wait for.
        """
        for average in self.averages:
            only_if(is_first, average.take_weights)
        clipped = ()
        for i in range(len(self.clips)):
            clipped = (*clipped, self.clips[i](grads[i], factors[i]))
        done = self.optimizers.update(clipped)
        if self.after_update is not None:
            self.after_update()
        for average in self.averages:
            done = ops.depend(done, average())
        return done

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        return self.optimizers.shared_state()
