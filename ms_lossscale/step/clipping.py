"""Gradient clipping, and the global norm that it measures."""

import math

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._check import check_number

# Where the sum of squares lies outside these, squares have overflowed or been flushed to zero. Then it is taken of the
# gradients times a power of two, which brings their squares back into float32's range and rounds nothing.
_SMALLEST_SUM, _LARGEST_SUM = 2.0**-80, 2.0**126
_ENLARGE, _REDUCE = 2.0**96, 2.0**-96
_SMALLEST_NORMAL = 2.0**-126


def check_clipping(owner, clip_norm, clip_value):
    """Raises unless at most one of them is given and that one is a number > 0. Returns both as floats or None."""
    if clip_norm is not None and clip_value is not None:
        raise ValueError(
            f"For '{owner}', a network's gradients are clipped by 'clip_norm' or by 'clip_value', but got both: "
            f"{clip_norm!r} and {clip_value!r}. Set one of them to None."
        )
    checked = []
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None:
            value = check_number(owner, name, value)
            if not value > 0:
                raise ValueError(f"For '{owner}', the argument '{name}' must be a number > 0, but got {value!r}.")
        checked.append(value)
    return tuple(checked)


class Clipping(nn.Cell):
    """
    Clips the gradients of one optimizer: by their global norm, as :func:`mindspore.ops.clip_by_global_norm`, or each
    element by its value.

    The gradients may still be multiplied by a scale; then clipping by the norm divides by it in the same multiply. The
    norm is exact over the whole range of float32: it is finite whenever the gradients are, so it is the overflow check
    too. What it stands for may exceed float32 itself; it is held as three Parameters, `root / power / scale`.

    Args:
        clip_norm (Union[None, float]): The largest global norm; inf only measures.
        clip_value (Union[None, float]): The largest absolute value.
        prefix (str): For the Parameters' names.
        of_rank (tuple[bool]): For each gradient whether it is that of a weight of which every rank has a part of its
            own. The norm is then that of all ranks together. Empty if there are none.
    """

    def __init__(self, clip_norm, clip_value, prefix, of_rank=()):
        super().__init__(auto_prefix=False)
        self.measures = clip_norm is not None
        self.clips_norm = self.measures and math.isfinite(clip_norm)
        self._clips_value = clip_value is not None
        self._bound = Tensor(clip_norm if self.clips_norm else clip_value or 0.0, mstype.float32)
        self._negative_bound = -self._bound
        if self.measures:
            self.root = self._state(0.0, f"{prefix}clipping.root")
            self.power = self._state(1.0, f"{prefix}clipping.power")
            self.scale = self._state(1.0, f"{prefix}clipping.scale")
        self._of_rank = of_rank
        if of_rank:
            self._of_all = tuple(not each for each in of_rank)
            self._sum_of_ranks = ops.AllReduce()

    @staticmethod
    def _state(value, name):
        return Parameter(Tensor(value, mstype.float32), name=name, requires_grad=False)

    def measure(self, grads, scale):
        """Measures the global norm of `grads / scale`. Returns whether it is finite, which tells whether they are."""
        sum_of_squares, power = self._sum_of_squares(grads)
        root = ops.sqrt(sum_of_squares)
        ops.assign(self.root, root)
        ops.assign(self.power, power)
        ops.assign(self.scale, scale)
        return ops.isfinite(root)

    def _sum_of_squares(self, grads):
        sum_of_squares, power = self._sum_over_ranks(grads), Tensor(1.0, mstype.float32)
        if ops.logical_or(sum_of_squares < _SMALLEST_SUM, sum_of_squares > _LARGEST_SUM):
            power = ops.select(sum_of_squares < 1.0, Tensor(_ENLARGE, mstype.float32), Tensor(_REDUCE, mstype.float32))
            sum_of_squares = self._sum_over_ranks(gradients.multiply(grads, power))
        return sum_of_squares, power

    def _sum_over_ranks(self, grads):
        if not self._of_rank:
            return gradients.sum_of_squares(grads)
        of_ranks = self._sum_of_ranks(gradients.sum_of_squares_where(self._of_rank, grads))
        return of_ranks + gradients.sum_of_squares_where(self._of_all, grads)

    def construct(self, grads):
        """Clips gradients that are known to be finite, and, if it is by the norm, have been measured."""
        if self.clips_norm:
            return self._clip_norm(grads)
        if self._clips_value:
            return gradients.clip(grads, self._negative_bound, self._bound)
        return grads

    def _clip_norm(self, grads):
        # grads / scale * min(1, clip_norm / norm).
        ratio = self._bound / self.root
        coefficient = ops.minimum(1.0 / self.scale, ratio * self.power)
        if coefficient < _SMALLEST_NORMAL:
            # Too small for one multiply: float32 would flush the coefficient to zero, and all gradients with it.
            grads = gradients.multiply(gradients.multiply(grads, self.power), ratio)
        else:
            grads = gradients.multiply(grads, coefficient)
        return grads

    def norm(self):
        """
        Reads the global norm, before clipping, at the last verdict.

        Returns:
            float.
        """
        return float(self.root.asnumpy()) / float(self.power.asnumpy()) / float(self.scale.asnumpy())
