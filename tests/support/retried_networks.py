"""Networks whose gradients overflow above a loss scale that the batch determines."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import InputGradient

LEARNING_RATE = 2.0**-10


class Slope(nn.Cell):
    """The gradient of its weights is `slope`, in float16. The forward counts its runs, and moves BatchNorm's
    statistics."""

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


class SteepBackward(Slope):
    """The gradient of its weights is `slope` squared, in float16, while its forward stays small."""

    def construct(self, x, slope):
        slope = slope.astype(mstype.float16)
        product = (self.weight * 2.0**-12).astype(mstype.float16) * slope * slope
        return product.astype(mstype.float32).sum() * 2.0**12


class Penalised(nn.Cell):
    """Its loss contains a gradient that is computed at the scale, and is infinite in float16 above some scale."""

    def __init__(self, loss_scale, name="slope"):
        super().__init__()
        self.inner, self.gradient = Slope(name), InputGradient(_Steep(), loss_scale)

    def construct(self, x, slope):
        return self.inner(x, slope) + self.gradient(x).mean() * self.inner.weight.sum()


class _Steep(nn.Cell):
    def construct(self, x):
        return (x.astype(mstype.float16) * 16.0).sum()


class HalvesItsInput(nn.Cell):  # The gradient of its weight is half of its input, in float16.
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(3, np.float32)), name="weight")

    def construct(self, x):
        x.copy_(x * 0.5)
        return (self.weight.astype(mstype.float16) * x.astype(mstype.float16)).sum()


def inputs(*slopes, seed=0):  # A batch, and the slopes of the networks.
    x = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    return Tensor(x), *(Tensor(np.float32(slope)) for slope in slopes)
