"""Cells whose forward or backward writes registered state, each in a different way: frozen Parameters and buffers.

Each is run in `modes`, in both if it does not say. In the other mode, MindSpore refuses to compile it, or the write
does not last. They take a batch of shape (4, 3) and return a tensor."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

FEATURES = 3
GRAPH, PYNATIVE = ("graph",), ("pynative",)


def state(name, shape=(FEATURES,), trainable=False):  # A Parameter whose elements differ.
    values = np.linspace(0.5, 1.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return Parameter(Tensor(values), name=name, requires_grad=trainable)


def moved(value, x):  # Another value that shows an inf of the batch.
    return ops.stop_gradient(value * 0.5 + x.mean(0))


class Way(nn.Cell):  # Base class, with a frozen Parameter `u`, and a weight that is only read.
    modes = ("graph", "pynative")
    # Keeps the scaled gradient: infinite when it overflows, which no lower scale is tried for.
    is_of_the_backward = False

    def __init__(self):
        super().__init__()
        name = type(self).__name__
        self.u, self.trained = state(f"{name}.u"), state(f"{name}.trained", trainable=True)

    def following(self, x):
        return moved(self.u, x)

    def construct(self, x):
        self.keep(x)
        return x * self.trained


class ByAssign(Way):
    def keep(self, x):
        ops.assign(self.u, self.following(x))


class BySetData(Way):
    modes = PYNATIVE

    def keep(self, x):
        self.u.set_data(self.following(x))


class ByView(Way):
    modes = PYNATIVE

    def keep(self, x):
        ops.depend(self.u, x).view(-1).copy_(self.following(x))


class ByMintInPlace(Way):
    modes = GRAPH

    def keep(self, x):
        self.u.mul_(ops.stop_gradient(x.mean(0)))


class ByScatterUpdate(Way):
    def keep(self, x):
        ops.scatter_update(self.u, Tensor([0], ms.int32), self.following(x)[:1])


class ByBatchNormFunction(Way):
    def __init__(self):
        super().__init__()
        self.variance = state(f"{type(self).__name__}.variance")
        self.shift = state(f"{type(self).__name__}.shift", trainable=True)

    def construct(self, x):
        return ops.batch_norm(x, self.u, self.variance, self.trained, self.shift, training=True)


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


class ByBackwardHook(Way):
    modes = PYNATIVE
    is_of_the_backward = True

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(FEATURES, FEATURES)
        self.layer.register_backward_hook(self.keep)

    def keep(self, cell, grad_input, grad_output):
        ops.assign(self.u, moved(self.u, grad_output[0]))

    def construct(self, x):
        return self.layer(x) * self.trained


class ByHookOfAParameter(Way):  # Registers the hook before there is a training cell.
    is_of_the_backward = True

    def __init__(self):
        super().__init__()
        self.trained.register_hook(self.keep)

    def keep(self, gradient):
        ops.assign(self.u, moved(self.u, gradient.reshape(1, -1)))
        return gradient

    def construct(self, x):
        return x * self.trained * 2


class ByBprop(Way):
    modes = PYNATIVE
    is_of_the_backward = True

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        ops.assign(self.u, moved(self.u, dout))
        return (dout * 2,)


class Queue(Way):  # Keeps the keys of earlier batches, and where it is.
    def __init__(self):
        super().__init__()
        self.queue = state("queue", (20, FEATURES))
        self.next = Parameter(Tensor(0, ms.int32), name="next", requires_grad=False)

    def construct(self, x):
        similarity = ops.matmul(x * self.trained, self.queue.T)
        self.queue[4:8] = ops.stop_gradient(x)
        ops.assign(self.next, (self.next + 4) % 20)
        return similarity


class BufferByCopy(nn.Cell):
    modes, is_of_the_backward = ("graph", "pynative"), False

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


class BatchNorm(nn.Cell):
    modes, is_of_the_backward = ("graph", "pynative"), False

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def construct(self, x):
        return self.norm(x)


WAYS = [cls for cls in list(vars().values()) if hasattr(cls, "is_of_the_backward") and cls is not Way]
