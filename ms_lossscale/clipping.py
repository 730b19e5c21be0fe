"""Gradient clipping, and the global norm that it measures."""

import math

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import gradients
from ms_lossscale._check import check_number

# Where the sum of squares lies outside these, squares have overflowed or been flushed to zero. Then the gradients are
# multiplied by a power of two first, which brings their squares back into float32's range and rounds nothing.
_SMALLEST_SUM, _LARGEST_SUM = 2.0**-80, 2.0**126
_ENLARGE, _REDUCE = 2.0**96, 2.0**-96


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

    The norm is exact over the whole range of float32: it is finite whenever the gradients are (so it is the overflow
    check too), except that what :meth:`norm` would return may exceed float32 itself. It is therefore held as two
    factors, `root / factor`, with `factor` a power of two.

    Args:
        clip_norm (Union[None, float]): The largest global norm; inf only measures.
        clip_value (Union[None, float]): The largest absolute value.
        prefix (str): For the Parameters' names.
    """

    def __init__(self, clip_norm, clip_value, prefix):
        super().__init__(auto_prefix=False)
        self.measures = clip_norm is not None
        self._clips_norm = self.measures and math.isfinite(clip_norm)
        self._clips_value = clip_value is not None
        self._bound = Tensor(clip_norm if self._clips_norm else clip_value or 0.0, mstype.float32)
        self._negative_bound = -self._bound
        if self.measures:
            self.root = Parameter(Tensor(0.0, mstype.float32), name=f"{prefix}clipping.root", requires_grad=False)
            self.factor = Parameter(Tensor(1.0, mstype.float32), name=f"{prefix}clipping.factor", requires_grad=False)

    def measure(self, grads):
        """Measures the global norm of the gradients. Returns whether it is finite, which tells whether they are."""
        sum_of_squares, factor = self._sum_of_squares(grads)
        root = ops.sqrt(sum_of_squares)
        ops.assign(self.root, root)
        ops.assign(self.factor, factor)
        return ops.isfinite(root)

    @staticmethod
    def _sum_of_squares(grads):
        sum_of_squares, factor = gradients.sum_of_squares(grads), Tensor(1.0, mstype.float32)
        if ops.logical_or(sum_of_squares < _SMALLEST_SUM, sum_of_squares > _LARGEST_SUM):
            factor = ops.select(sum_of_squares < 1.0, Tensor(_ENLARGE, mstype.float32), Tensor(_REDUCE, mstype.float32))
            sum_of_squares = gradients.sum_of_squares(gradients.multiply(grads, factor))
        return sum_of_squares, factor

    def construct(self, grads):
        """Clips gradients that are known to be finite, and, if it is by the norm, have been measured."""
        if self._clips_norm:
            return self._clip_norm(grads)
        if self._clips_value:
            return gradients.clip(grads, self._negative_bound, self._bound)
        return grads

    def _clip_norm(self, grads):
        # min(1, clip_norm / norm), in an order in which nothing overflows and nothing is flushed to zero.
        coefficient = ops.minimum(1.0 / self.factor, self._bound / self.root)
        if self.factor == 1.0:
            grads = gradients.multiply(grads, coefficient)
        else:
            grads = gradients.multiply(gradients.multiply(grads, self.factor), coefficient)
        return grads

    def norm(self):
        """
        Reads the global norm, before clipping, at the last verdict.

        Returns:
            float.
        """
        return float(self.root.asnumpy()) / float(self.factor.asnumpy())
