"""The gradient of a network with respect to its input, for losses that contain one."""

import numbers
from typing import Any, Union

from mindspore import GRAPH_MODE, Parameter, Tensor, get_context, jit, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._arguments import check_cell, check_scale, describe
from ms_lossscale.loss_scale import LossScale
from ms_lossscale.step.returned import described
from ms_lossscale.step.scaling import scaled

_grad = ops.GradOperation()
_FLOATS = (mstype.float16, mstype.float32, mstype.float64, mstype.bfloat16)


class _StaysFloat32(nn.Cell):
    """A cell that casts pass by, so that its scale stays float32: 65536 is infinite in float16."""

    def add_flags(self, **flags: Any) -> nn.Cell:
        return super().add_flags(**{name: flag for name, flag in flags.items() if name not in ("fp16", "bf16")})


class InputGradient(_StaysFloat32):
    """
    The gradient of `sum(network(x))` with respect to `x`, computed under a loss scale and divided by it.

    In float16 such a gradient may itself be too small or too large, and the scale of the loss that it is a part of is
    applied too late to help. Here it has its own scale, and is returned in float32. It can be differentiated again, for
    a gradient penalty. In PyNative mode, MindSpore loses second derivatives of some operators; on CPU, those of
    :func:`mindspore.ops.matmul` and of convolutions. So this Cell is compiled there, which keeps them right. Python
    side effects in the network (a print, a counter) then happen only once.

    The gradient that flows back into it is multiplied by the loss's scale and divided by this scale. If this scale is
    far above the loss's scale, that gradient underflows; if it is far below, it overflows. With one scale for both, it
    stays as it is.

    If the gradient overflows, it is not finite, and neither are the loss that contains it and that loss's gradients. So
    the training cell skips the step. At a scale of 65536 or more, the gradient of a network that returns float16 always
    overflows.

    Args:
        network (Cell): A network that returns one Tensor of any shape and float type, for example a critic.
        loss_scale (Union[None, float, LossScale]): ``None`` means 1. A number is a separate, fixed scale. To use the
            loss scale of a training cell, pass the same LossScale object to both. If the cell has several, pass the one
            of the network whose loss contains this gradient. :class:`AlternatingTrainOneStepCell` copies a single loss
            scale, so pass it a list. Default: ``None`` .

    Inputs:
        - **x** (Tensor) - The input to differentiate by, of a float type.
        - **\\*rest** - Further inputs of the network.

    Outputs:
        Tensor, float32, of the shape of `x`.

    Raises:
        TypeError: If `network` is not a Cell or `loss_scale` is none of these, or, when called, if `x` is not of a
            float type or the network does not return a Tensor.
        ValueError: If `loss_scale` is a number that is not finite or not > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn, ops
        >>> from mindspore import dtype as mstype
        >>> from ms_lossscale import DynamicLossScale, InputGradient, ScaledTrainOneStepCell
        >>> class CriticLoss(nn.Cell):
        ...     def __init__(self, critic, loss_scale):
        ...         super().__init__(auto_prefix=False)
        ...         self.critic = critic
        ...         self.slope = InputGradient(critic, loss_scale)
        ...
        ...     def construct(self, real, fake):
        ...         norm = ops.sqrt(ops.square(self.slope(0.5 * (real + fake))).sum(1) + 1e-12)
        ...         return self.critic(fake).mean() - self.critic(real).mean() + 10 * ops.square(norm - 1).mean()
        >>> critic = nn.SequentialCell(nn.Dense(2, 8), nn.Tanh(), nn.Dense(8, 1)).to_float(mstype.float16)
        >>> loss_scale = DynamicLossScale(2.0**10)
        >>> network = CriticLoss(critic, loss_scale)
        >>> cell = ScaledTrainOneStepCell(network, nn.Adam(critic.trainable_params()), loss_scale)
        >>> real, fake = Tensor(np.ones((4, 2), np.float32)), Tensor(np.zeros((4, 2), np.float32))
        >>> loss, overflow, scale = cell(real, fake)
        >>> print(overflow, scale)
        False 1024.0
    """

    def __init__(self, network: nn.Cell, loss_scale: Union[float, LossScale, None] = None) -> None:
        super().__init__(auto_prefix=False)
        self._owner = owner = type(self).__name__
        check_cell(owner, "network", network, "Pass the cell to differentiate, a critic say.")
        self.network = network
        # Hidden from MindSpore: its Parameters belong to the training cell, not to a network.
        object.__setattr__(self, "loss_scale", loss_scale if isinstance(loss_scale, LossScale) else None)
        self._own_scale = Tensor(_number(owner, loss_scale), mstype.float32)
        self._graph = self._new_graph()
        self._compiled_for = None

    def __call__(self, *inputs: Any) -> Tensor:
        if get_context("mode") == GRAPH_MODE:
            return super().__call__(*inputs)
        if inputs and isinstance(inputs[0], Parameter):
            # MindSpore fails to compile a gradient by a Parameter itself ("Can't find graph output by front node").
            inputs = (inputs[0] * 1, *inputs[1:])
        if self._compiled_for is not None and self._compiled_for != self._fixed_when_compiled():
            self._graph, self._compiled_for = self._new_graph(), None
        grad = super().__call__(*inputs)
        if self._compiled_for is None:
            self._compiled_for = self._fixed_when_compiled()
            # Other tensors keep the same memory alive, so that no other Parameter gets it.
            self._aliases = list(map(Tensor, self._parameters()))
        return grad

    def construct(self, x, *rest):
        if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
            _no_float(self._owner, described(x), x.dtype if isinstance(x, Tensor) else None)
        return self._graph(x, *rest)

    def _new_graph(self):
        return _Graph(self._owner, self.network, self.loss_scale, self._own_scale)

    def _parameters(self):
        scale = () if self.loss_scale is None else (self.loss_scale.scale_value,)
        return (*self.network.get_parameters(), *scale)

    def _fixed_when_compiled(self):
        """Returns the addresses of the Parameters, which loading may change, and the cells' modes."""
        addresses = list(map(Tensor.data_ptr, self._parameters()))
        return addresses, [cell.training for _, cell in self.network.cells_and_names()]


class _Graph(_StaysFloat32):
    """
    Computes the gradient in one compiled graph, also in PyNative mode, which loses some second derivatives.

    It is a cell of its own so that it can be replaced: code compiled in PyNative mode does not follow changes.
    """

    def __init__(self, owner, network, loss_scale, own_scale):
        super().__init__(auto_prefix=False)
        self.network = network
        object.__setattr__(self, "_loss_scale", loss_scale)
        self._own_scale = own_scale
        self._one = Tensor(1.0, mstype.float32)
        self._owner = owner

    @jit
    def construct(self, x, *rest):
        scale = self._read_scale()
        # A method's gradient: MindSpore can't compile that of a Cell which another loss of the graph calls, too.
        grad = _grad(self._scaled_output)(x, scale, *rest)
        return gradients.multiply(grad, self._one / scale)

    def _read_scale(self):
        if self._loss_scale is None:
            return self._own_scale
        return gradients.copy(self._loss_scale.scale_value)

    def _scaled_output(self, x, scale, *rest):
        output = self.network(x, *rest)
        if not isinstance(output, Tensor):
            _not_one_tensor(self._owner, described(output))
        return scaled(output, scale)


# Graph mode runs a function of constants when it compiles, and passes on the exceptions that it raises.
@ops.constexpr
def _not_one_tensor(owner, returned):
    raise TypeError(
        f"For '{owner}', the network must return one Tensor, but it returned {returned}. Wrap it in a Cell that "
        f"returns what is to be differentiated."
    )


@ops.constexpr
def _no_float(owner, passed, dtype):
    raise TypeError(
        f"For '{owner}', the input 'x' must be a Tensor of a float type, since it is differentiated by, but got "
        f"{passed}{'' if dtype is None else f' and dtype {dtype}'}. Pass what is computed from it instead, the output "
        f"of an embedding say, to an InputGradient of the layers that follow."
    )


def _number(owner, loss_scale):
    """Returns the separate, fixed scale, 1 if there is none."""
    if loss_scale is None or isinstance(loss_scale, LossScale):
        return 1.0
    if not isinstance(loss_scale, numbers.Real) or isinstance(loss_scale, bool):
        raise TypeError(
            f"For '{owner}', the argument 'loss_scale' must be None, a number, or the same LossScale object that you "
            f"pass to the training cell, but got {describe(loss_scale)}."
        )
    return check_scale(owner, "loss_scale", loss_scale)


def holds_input_gradient(networks, loss_scale):
    """Returns whether the networks contain an InputGradient on this loss scale."""
    cells = [cell for network in networks for _, cell in network.cells_and_names()]
    return any(isinstance(cell, InputGradient) and cell.loss_scale is loss_scale for cell in cells)
