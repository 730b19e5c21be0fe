"""Cells that write state by MindSpore's operators, cells and hooks, also in the backward; run as `ways_to_write`."""

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common._grad_function import _Function

from support.ways_to_write import FEATURES, GRAPH, PYNATIVE, Way, moved, state, unreadable, write


class ByPrimitive(Way):
    def __init__(self):
        super().__init__()
        self.assign = ops.Assign()

    def construct(self, x):
        x = ops.depend(x, self.assign(self.u, self.following(x)))
        return x * self.trained


class ByAssignAdd(Way):
    def construct(self, x):
        ops.assign_add(self.u, ops.stop_gradient(x.mean(0)))
        return x * self.trained


class ByAssignSub(Way):
    def construct(self, x):
        ops.assign_sub(self.u, ops.stop_gradient(x.mean(0)))
        return x * self.trained


class ByScatterUpdate(Way):
    def construct(self, x):
        ops.scatter_update(self.u, Tensor([0], ms.int32), self.following(x)[:1])
        return x * self.trained


class ByScatterNdUpdate(Way):
    def __init__(self):
        super().__init__()
        self.scatter = ops.ScatterNdUpdate()

    def construct(self, x):
        self.scatter(self.u, Tensor([[0]], ms.int32), self.following(x)[:1])
        return x * self.trained


class ByMintInPlace(Way):
    modes = GRAPH

    def construct(self, x):
        self.u.mul_(ops.stop_gradient(x.mean(0)))
        return x * self.trained


class ByBatchNormPrimitive(Way):
    def __init__(self):
        super().__init__()
        self.variance = state(f"{type(self).__name__}.variance")
        self.shift = state(f"{type(self).__name__}.shift", trainable=True)
        self.batch_norm = ops.BatchNorm(is_training=True)

    def construct(self, x):
        return self.batch_norm(x, self.trained, self.shift, self.u, self.variance)[0]


class ByBatchNormFunction(Way):
    def __init__(self):
        super().__init__()
        self.variance = state(f"{type(self).__name__}.variance")
        self.shift = state(f"{type(self).__name__}.shift", trainable=True)

    def construct(self, x):
        return ops.batch_norm(x, self.u, self.variance, self.trained, self.shift, training=True)


class ByMap(Way):
    def construct(self, x):
        ops.Map()(write, (self.u,), (self.following(x),))
        return x * self.trained


class ByPartialOfMindSpore(Way):
    def construct(self, x):
        ops.partial(write, self.u)(self.following(x))
        return x * self.trained


class WithinAGradient(Way):
    def loss(self, x):
        ops.assign(self.u, self.following(x))
        return (x * x).sum()

    def construct(self, x):
        return ops.stop_gradient(ops.grad(self.loss)(x)) * self.trained


class ByJit(Way):
    @ms.jit
    def construct(self, x):
        ops.assign(self.u, self.following(x))
        return x * self.trained


class ByJitOfAFunction(Way):
    def construct(self, x):
        jitted(self.u, self.following(x))
        return x * self.trained


@ms.jit
def jitted(memory, value):
    return ops.assign(memory, value)


class ByOptimizer(Way):
    """An optimizer called in the forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Momentum([state(f"{type(self).__name__}.loose", trainable=True)], 0.1, 0.9)

    def construct(self, x):
        self.inner((ops.stop_gradient(x.mean(0)),))
        return x * self.trained


class ByMethodOfAnOptimizer(ByOptimizer):
    def construct(self, x):
        self.inner.construct((ops.stop_gradient(x.mean(0)),))
        return x * self.trained


class ByOptimizerOfTheMoment(Way):
    modes = PYNATIVE

    def __init__(self):
        super().__init__()
        self.loose = state(f"{type(self).__name__}.loose", trainable=True)

    def construct(self, x):
        nn.SGD([self.loose], 0.1)((ops.stop_gradient(x.mean(0)),))
        return x * self.trained


class ByForwardHook(Way):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(FEATURES, FEATURES)
        self.layer.register_forward_hook(self.keep)

    def keep(self, cell, inputs, output):
        ops.assign(self.u, moved(self.u, output))

    def construct(self, x):
        return self.layer(x) * self.trained


class ByForwardPreHook(Way):
    modes = PYNATIVE

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(FEATURES, FEATURES)
        self.layer.register_forward_pre_hook(self.keep)

    def keep(self, cell, inputs):
        ops.assign(self.u, moved(self.u, inputs[0]))

    def construct(self, x):
        return self.layer(x) * self.trained


class ByBackwardHook(Way):
    """Writes in the backward."""

    modes = PYNATIVE

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(FEATURES, FEATURES)
        self.layer.register_backward_hook(self.keep)

    def keep(self, cell, grad_input, grad_output):
        ops.assign(self.u, moved(self.u, grad_output[0]))

    def construct(self, x):
        return self.layer(x) * self.trained


class ByHookOfATensor(Way):
    def keep(self, gradient):
        ops.assign(self.u, moved(self.u, gradient))

    def construct(self, x):
        y = x * self.trained
        y.register_hook(self.keep)
        return y * 2


class ByHookOfAParameter(Way):
    """Registers the hook before there is a training cell."""

    def __init__(self):
        super().__init__()
        self.trained.register_hook(self.keep)

    def keep(self, gradient):
        ops.assign(self.u, moved(self.u, gradient.reshape(1, -1)))
        return gradient

    def construct(self, x):
        return x * self.trained * 2


class WritingBackward(_Function):
    @staticmethod
    def forward(ctx, x, memory, saved):
        ctx.memory = memory
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        ops.assign(ctx.memory, moved(ctx.memory, gradient))
        ops.assign(saved, moved(saved, gradient))
        return gradient * 2, None, None


class ByBackwardOfAFunction(Way):
    modes = PYNATIVE
    writes = ("ByBackwardOfAFunction.u", "ByBackwardOfAFunction.saved")

    def __init__(self):
        super().__init__()
        self.saved = state(f"{type(self).__name__}.saved")

    def construct(self, x):
        return WritingBackward.apply(x * self.trained, self.u, self.saved)


class ByInsertGradientOf(Way):
    def __init__(self):
        super().__init__()
        self.insert = ops.InsertGradientOf(self.keep)

    def keep(self, gradient):
        ops.assign(self.u, moved(self.u, gradient))
        return gradient

    def construct(self, x):
        return self.insert(x * self.trained) * 2


class ByBprop(Way):
    modes = PYNATIVE

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        ops.assign(self.u, moved(self.u, dout))
        return (dout * 2,)


class BufferByCopy(nn.Cell):
    modes = ("graph", "pynative")

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", Tensor([0.5, 1.0, 1.5]))

    def construct(self, x):
        self.seen.copy_(moved(self.seen, x))
        return x * 2


class BufferByEllipsis(BufferByCopy):
    modes = PYNATIVE

    def construct(self, x):
        self.seen[...] = moved(self.seen, x)
        return x * 2


class BufferByFunctionWithoutSource(BufferByCopy):
    modes = PYNATIVE

    def construct(self, x):
        unreadable(self.seen, moved(self.seen, x))
        return x * 2


class BatchNorm(nn.Cell):
    modes = ("graph", "pynative")

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def construct(self, x):
        return self.norm(x)
