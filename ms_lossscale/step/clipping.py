"""Gradient clipping, and the global norm for it."""

import math
from collections.abc import Sequence
from typing import Optional

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.stage import Alone, Clipping

# If the sum of squares lies outside these, squares have overflowed or been flushed to zero. It is then computed from
# the gradients times a power of two, which brings their squares back into float32's range without rounding.
_SMALLEST_SUM, _LARGEST_SUM = 2.0**-80, 2.0**126
_ENLARGE, _REDUCE = 2.0**96, 2.0**-96
_SMALLEST_NORMAL = 2.0**-126


def _tensor(value):
    return Tensor(value, mstype.float32)


class ClippingOfOne(nn.Cell):
    """
    Clips the gradients of one network. This base class leaves them as they are. `norm` measures them before the
    overflow check, when they may not be finite.
    """

    def __init__(self, norm: Optional["GlobalNorm"] = None) -> None:
        super().__init__(auto_prefix=False)
        self.norm = norm

    def measure(self, grads):
        """Measures the gradients: returns whether they are finite, () without a norm."""
        return () if self.norm is None else (self.norm(grads),)

    def construct(self, grads):
        return grads


class ClipByValue(ClippingOfOne):
    """Clips each element to an absolute value of at most `clip_value`."""

    def __init__(self, clip_value: float) -> None:
        super().__init__()
        self._low, self._high = _tensor(-clip_value), _tensor(clip_value)

    def construct(self, grads):
        return gradients.clip(grads, self._low, self._high)


class Norm(nn.Cell):
    """
    Measures the global norm of gradients, over the whole range of float32. Returns two float32 Tensors of shape
    :math:`()`, `root` and `power`: the norm, which may exceed float32, is `root / power`. `root` is finite if and only
    if the gradients are.

    `split` says for each gradient whether each rank has its own part of the weight. The norm is then that of all ranks
    together.
    """

    def __init__(self, ranks: Alone, split: Sequence[bool]) -> None:
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self._split = tuple(split) if any(split) else ()
        self._shared = tuple(not each for each in split)
        self._one, self._zero = _tensor(1.0), _tensor(0.0)
        self._smallest, self._largest = _tensor(_SMALLEST_SUM), _tensor(_LARGEST_SUM)
        self._enlarge, self._reduce = _tensor(_ENLARGE), _tensor(_REDUCE)

    def construct(self, grads):
        sum_of_squares, power = self._sum_of_squares(grads), self._one
        if prim.logical_or(sum_of_squares < self._smallest, sum_of_squares > self._largest):
            power = prim.select(sum_of_squares < self._one, self._enlarge, self._reduce)
            sum_of_squares = self._sum_of_squares(gradients.multiply(grads, power))
        return ops.sqrt(sum_of_squares), power

    def _sum_of_squares(self, grads):
        if not self._split:
            return gradients.sum_of_squares(grads)
        of_ranks = self.ranks.sum(gradients.sum_of_squares_where(self._zero, self._split, grads))
        return of_ranks + gradients.sum_of_squares_where(self._zero, self._shared, grads)


class GlobalNorm(nn.Cell):
    """
    Measures the global norm of one network's gradients. Returns whether it is finite, a bool Tensor of shape
    :math:`()`, which serves as the overflow check, too. It holds the norm in two Parameters, as `root / power`.
    """

    def __init__(self, ranks, split, prefix):
        super().__init__(auto_prefix=False)
        self.norm = Norm(ranks, split)
        self.root = self._state(0.0, f"{prefix}clipping.root")
        self.power = self._state(1.0, f"{prefix}clipping.power")

    @staticmethod
    def _state(value, name):
        return Parameter(_tensor(value), name=name, requires_grad=False)

    def construct(self, grads):
        root, power = self.norm(grads)
        prim.assign(self.root, root)
        prim.assign(self.power, power)
        return prim.isfinite(root)

    def parts(self):
        """Returns the Parameters that hold the norm of the last check."""
        return self.root, self.power

    @staticmethod
    def value_of(root, power):
        """Reads the norm, a float, from these Parameters or from copies of them."""
        return float(root.asnumpy()) / float(power.asnumpy())


class ClipByGlobalNorm(ClippingOfOne):
    """Clips by the global norm like :func:`mindspore.ops.clip_by_global_norm`."""

    def __init__(self, clip_norm: float, norm: "GlobalNorm") -> None:
        super().__init__(norm)
        self._bound, self._one, self._smallest_normal = _tensor(clip_norm), _tensor(1.0), _tensor(_SMALLEST_NORMAL)

    def construct(self, grads):
        ratio = self._bound / self.norm.root
        coefficient = prim.minimum(self._one, ratio * self.norm.power)
        if coefficient < self._smallest_normal:
            # In two steps, since float32 would flush the coefficient to zero, and all gradients with it.
            grads = gradients.multiply(gradients.multiply(grads, self.norm.power), ratio)
        else:
            grads = gradients.multiply(grads, coefficient)
        return grads


class ClippingOfEach(Clipping):
    """Clips or measures each network's gradients according to its own setting. `packing` tells which are whose."""

    def __init__(self, clips: list[ClippingOfOne], packing: Packing) -> None:
        super().__init__(len(clips))
        self.clips = nn.CellList(clips, auto_prefix=False)
        self.packing = packing
        self.finds_overflow = all(clip.norm is not None for clip in clips)

    def measure(self, grads):
        are_finite = ()
        for i in range(len(self.clips)):
            are_finite += self.clips[i].measure(self.packing.of_network(i, grads))
        return are_finite

    def construct(self, grads):
        clipped = ()
        for i in range(len(self.clips)):
            clipped += self.clips[i](self.packing.of_network(i, grads))
        return clipped

    def measures(self):
        return [clip.norm for clip in self.clips]


def make_clip(clip_norm, clip_value, weights, ranks, prefix):
    """Returns the clipping that the settings of one network ask for."""
    if clip_value is not None:
        return ClipByValue(clip_value)
    if clip_norm is None:
        return ClippingOfOne()
    norm = GlobalNorm(ranks, ranks.are_split(weights), prefix)
    return ClippingOfOne(norm) if math.isinf(clip_norm) else ClipByGlobalNorm(clip_norm, norm)


def make_clipping(clips, packing):
    """Returns the clipping of a step, given that of each network."""
    if all(type(clip) is ClippingOfOne and clip.norm is None for clip in clips):
        return Clipping(len(clips))
    return ClippingOfEach(clips, packing)


def with_norms_unscaled(parameters):
    """Returns a checkpoint without the scales by which, up to version 0.3, global norms still had to be divided."""
    unscaled = dict(parameters)
    for name, value in parameters.items():
        if name.endswith("clipping.scale"):
            root = name.replace("clipping.scale", "clipping.root")
            del unscaled[name]
            if root in parameters:
                unscaled[root] = parameters[root] / value
    return unscaled
