"""What an applied step does: clip by the global norm, step the optimizers, and move the averages of weights."""

import math

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale.step.optimizers import Optimizers

# If the sum of squares lies outside these, squares have overflowed or been flushed to zero. It is then computed from
# the gradients times a power of two, which brings their squares back into float32's range without rounding.
_SMALLEST_SUM = 2.0**-80
_LARGEST_SUM = 2.0**126
_ENLARGE = 2.0**96
_REDUCE = 2.0**-96
_SMALLEST_NORMAL = 2.0**-126


def _tensor(value):
    return Tensor(value, mstype.float32)


def _square_sum(tensor):
    """Returns the sum of the squares of all elements, float32 of shape ()."""
    # In float16, squares overflow from 256 on.
    return gradients.sum_of(prim.square(prim.cast(tensor, mstype.float32)))


_square_sums = gradients.of_each("Tensor")(_square_sum)


@gradients.of_one("Tensor", "Bool", "Tensor")
def _square_sum_where(zero, counts, tensor):
    """Returns the same if `counts`, a bool, else `zero`."""
    if counts:
        return _square_sum(tensor)
    return zero


@gradients.of_one("Tensor", "Tensor", "Tensor")
def _limit(low, high, tensor):
    """Limits each element to at least `low` and at most `high`."""
    return prim.minimum(prim.maximum(tensor, low), high)


@gradients.of_one("Tensor", "Tensor", "Tensor", "Tensor")
def _average(decay, rest, average, value):
    """Sets an average in place to `decay * average + rest * value`."""
    return prim.assign(average, decay * average + rest * prim.cast(value, mstype.float32))


class Norm(nn.Cell):
    """
    Measures the global norm of gradients, over the whole range of float32. Returns two float32 Tensors of shape
    :math:`()`, `root` and `power`: the norm, which may exceed float32, is `root / power`. `root` is finite if and only
    if the gradients are. `split` says for each gradient whether each rank has its own part of the weight.
    """

    def __init__(self, ranks, split):
        super().__init__(auto_prefix=False)
        self.ranks = ranks if any(split) else None
        self._split = tuple(split)
        self._shared = tuple(not is_split for is_split in split)
        self._zero = _tensor(0.0)
        self._one = _tensor(1.0)
        self._smallest = _tensor(_SMALLEST_SUM)
        self._largest = _tensor(_LARGEST_SUM)
        self._enlarge = _tensor(_ENLARGE)
        self._reduce = _tensor(_REDUCE)

    def construct(self, grads):
        total = self._sum_of_squares(grads)
        power = self._one
        if prim.logical_or(prim.less(total, self._smallest), prim.greater(total, self._largest)):
            power = prim.select(prim.less(total, self._one), self._enlarge, self._reduce)
            total = self._sum_of_squares(gradients.multiply(grads, power))
        return prim.sqrt(total), power

    def _sum_of_squares(self, grads):
        if self.ranks is None:
            return prim.addn(_square_sums(grads))
        of_ranks = self.ranks.sum(self._sum_where(self._split, grads))
        return prim.add(of_ranks, self._sum_where(self._shared, grads))

    def _sum_where(self, counts, grads):
        return prim.addn(gradients.map_each(ops.partial(_square_sum_where, self._zero), counts, grads))


class Clip(nn.Cell):
    """Clips the gradients of one network by `clip_value`, or by the norm that it measures before the overflow check."""

    def __init__(self, plan, number):
        super().__init__(auto_prefix=False)
        clip_norm = plan.settings.clip_norm[number]
        clip_value = plan.settings.clip_value[number]
        prefix = plan.prefixes[number]
        self.norm = None
        self._bound = None
        self._low = None
        if clip_value is not None:
            self._low = _tensor(-clip_value)
            self._high = _tensor(clip_value)
        if clip_norm is not None:
            self.norm = Norm(plan.ranks, plan.split[number])
            self.root = Parameter(_tensor(0.0), name=f"{prefix}clipping.root", requires_grad=False)
            self.power = Parameter(_tensor(1.0), name=f"{prefix}clipping.power", requires_grad=False)
            if not math.isinf(clip_norm):
                self._bound = _tensor(clip_norm)
                self._one = _tensor(1.0)
                self._smallest = _tensor(_SMALLEST_NORMAL)

    def measure(self, grads):
        """Measures the norm. Returns whether the gradients are finite; None without a norm."""
        if self.norm is None:
            return None
        root, power = self.norm(grads)
        prim.assign(self.root, root)
        prim.assign(self.power, power)
        return prim.isfinite(root)

    def construct(self, grads):
        if self._low is not None:
            grads = gradients.map_each(ops.partial(_limit, self._low, self._high), grads)
        if self._bound is not None:
            ratio = prim.div(self._bound, self.root)
            coefficient = prim.minimum(self._one, prim.mul(ratio, self.power))
            if prim.less(coefficient, self._smallest):
                # In two steps, since float32 would flush the coefficient to zero, and all gradients with it.
                grads = gradients.multiply(gradients.multiply(grads, self.power), ratio)
            else:
                grads = gradients.multiply(grads, coefficient)
        return grads

    def value(self):
        """Reads the norm of the last check, a float, or None if it is not measured."""
        return None if self.norm is None else float(self.root.asnumpy()) / float(self.power.asnumpy())


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

    def begin(self):
        """Copies the present weights."""
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

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        settings = plan.settings
        self.optimizers = Optimizers(plan.optimizers)
        self.after_update = settings.after_update
        clips = [Clip(plan, i) for i in range(len(plan.optimizers))]
        self.clips = nn.CellList(clips, auto_prefix=False)
        self._clips_any = any(bound is not None for bound in (*settings.clip_norm, *settings.clip_value))
        self._measures_all = all(norm is not None for norm in settings.clip_norm)
        # A network that has a step of its own needs none: the names of weights are unique in a cell.
        prefix = plan.prefix if plan.is_manual else ""
        averages = [
            MovingAverage(decay, weights, prefix)
            for decay, weights in zip(settings.ema_decay, plan.weights)
            if decay is not None
        ]
        self.averages = nn.CellList(averages, auto_prefix=False)

    def measure(self, grads):
        """Measures the norms. Returns whether each network's gradients are finite, None unless all are measured."""
        if not self._clips_any:
            return None
        finite = ()
        for i in range(len(self.clips)):
            finite = (*finite, self.clips[i].measure(grads[i]))
        return finite if self._measures_all else None

    def apply(self, grads, is_first):
        """Updates the weights; `is_first` tells whether no step was applied before. Returns what to wait for."""
        for average in self.averages:
            only_if(is_first, average.begin)
        done = self.optimizers.update(self._clipped(grads) if self._clips_any else grads)
        if self.after_update is not None:
            self.after_update()
        for average in self.averages:
            done = ops.depend(done, average())
        return done

    def _clipped(self, grads):
        clipped = ()
        for i in range(len(self.clips)):
            clipped = (*clipped, self.clips[i](grads[i]))
        return clipped

    def norms(self):
        """Reads the global norm of each network at the last check, None where it is not measured."""
        return [clip.value() for clip in self.clips]

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        return self.optimizers.shared_state()
