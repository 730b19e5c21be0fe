"""Whether all gradients are finite."""

from collections.abc import Sequence
from typing import Union

from mindspore import RowTensor, Tensor, mutable, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients


class _AllFinite(nn.Cell):
    def __init__(self):
        super().__init__()
        self._zero = Tensor(0, mstype.int32)

    def __call__(self, grads):
        # Runs outside of graphs only, where MindSpore can't map over a RowTensor and takes a tuple for a constant.
        grads = tuple(grad.values if isinstance(grad, RowTensor) else grad for grad in grads)
        return super().__call__(mutable(grads)) if grads else Tensor(True)

    def construct(self, grads):
        if len(grads) == 0:
            return ops.equal(self._zero, self._zero)
        return gradients.finite(grads)


_all_finite = _AllFinite()


def all_finite(grads: Sequence[Union[Tensor, RowTensor]]) -> Tensor:
    """
    Whether every element of all gradients is finite, for hand-written training loops.

    Unlike :func:`mindspore.amp.all_finite`, it accepts bfloat16 gradients, sparse ones and an empty list, and is about
    ten times faster on CPU. It looks at the gradients even on an NPU in saturation mode, where only
    :class:`FloatStatusRegister` shows overflows.

    Args:
        grads (Union[tuple, list]): Tensors of any shape in float16, bfloat16 or float32, which you may mix, or
            RowTensors. An empty tuple counts as finite.

    Returns:
        Tensor, bool, of shape :math:`()`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_lossscale import all_finite
        >>> all_finite((Tensor([1.0, 2.0]), Tensor([3.0])))
        Tensor(shape=[], dtype=Bool, value= True)
        >>> all_finite((Tensor([1.0, float("inf")]), Tensor([3.0])))
        Tensor(shape=[], dtype=Bool, value= False)
    """
    return _all_finite(grads)
