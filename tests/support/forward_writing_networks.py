"""
Networks whose forward writes Parameters or buffers, as users write them.

Each takes a batch of shape (4, 3); `writes` has the names of what its forward writes.
"""

import functools

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

FEATURES = 3


def batch():
    return Tensor(np.linspace(-1.0, 2.0, 4 * FEATURES, dtype=np.float32).reshape(4, FEATURES))


def state(name, shape=(FEATURES,), trainable=False):
    """Returns a Parameter whose elements differ."""
    values = np.linspace(0.5, 1.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return Parameter(Tensor(values), name=name, requires_grad=trainable)


def freeze(cell):
    for parameter in cell.get_parameters():
        parameter.requires_grad = False
    return cell


def normalised(vector):
    return vector / (ops.sqrt((vector * vector).sum()) + 1e-12)


class SpectralNorm(nn.Cell):
    """Wraps a layer as in HiFaceGAN. The names of its vectors are composed."""

    writes = ("weight_u", "weight_v")

    def __init__(self, layer=None, name="weight", power_iterations=1):
        super().__init__()
        self.layer = nn.Dense(FEATURES, 5) if layer is None else layer
        self.weight_name = name
        self.power_iterations = power_iterations
        weight = getattr(self.layer, name)
        self.layer.weight_u = state("weight_u", (weight.shape[0],))
        self.layer.weight_v = state("weight_v", (int(np.prod(weight.shape[1:])),))
        self.matmul = ops.MatMul(transpose_b=True)

    def sigma(self):
        u = getattr(self.layer, self.weight_name + "_u")
        v = getattr(self.layer, self.weight_name + "_v")
        weight = getattr(self.layer, self.weight_name)
        matrix = weight.reshape((weight.shape[0], -1))
        for _ in range(self.power_iterations):
            ops.assign(v, normalised(ops.matmul(matrix.T, u)))
            ops.assign(u, normalised(ops.matmul(matrix, v)))
        return (u * ops.matmul(matrix, v)).sum()

    def construct(self, x):
        return self.matmul(x, self.layer.weight / self.sigma())


def power_iteration(weight, u, v):
    new_v = normalised(ops.matmul(weight.T, u))
    new_u = normalised(ops.matmul(weight, new_v))
    ops.assign(u, new_u)
    ops.assign(v, new_v)
    return (new_u * ops.matmul(weight, new_v)).sum()


class SpectralNormByFunction(nn.Cell):
    """Passes the Parameters to a function of the module; a frozen weight beside them is only read."""

    writes = ("u", "v")

    def __init__(self):
        super().__init__()
        self.weight = state("weight", (FEATURES, FEATURES), trainable=True)
        self.u = state("u")
        self.v = state("v")
        self.frozen = state("frozen", (FEATURES, FEATURES))

    def construct(self, x):
        sigma = power_iteration(self.weight, self.u, self.v)
        return ops.matmul(ops.matmul(x, self.weight / sigma), self.frozen)


class InheritedSpectralNorm(SpectralNormByFunction):
    def construct(self, x):
        return super().construct(x)


class InheritedInTheOldWay(SpectralNormByFunction):
    def construct(self, x):
        return super(InheritedInTheOldWay, self).construct(x)  # noqa: UP008


class SpectralNormByPrimitives(nn.Cell):
    writes = ("u",)

    def __init__(self):
        super().__init__()
        self.u = state("u")
        self.frozen = state("frozen")
        self.assign = ops.Assign()
        self.normalise = ops.L2Normalize()

    def construct(self, x):
        u = self.u
        x = ops.depend(x, self.assign(u, self.normalise(u + x[0])))
        return x * self.frozen


class Codebook(nn.Cell):
    """A VQ-VAE's codebook: each input gets the nearest code; codes follow an average of their inputs."""

    writes = ("codes", "sizes", "sums")

    def __init__(self, codes=5, decay=0.9):
        super().__init__()
        self.decay = decay
        self.codes = state("codes", (codes, FEATURES))
        self.sizes = state("sizes", (codes,))
        self.sums = state("sums", (codes, FEATURES))
        self.prior = freeze(nn.Embedding(codes, FEATURES))

    def construct(self, x):
        distances = ((x.expand_dims(1) - self.codes) ** 2).sum(-1)
        nearest = distances.argmin(-1)
        chosen = ops.one_hot(nearest, self.codes.shape[0], Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
        if self.training:
            ops.assign(self.sizes, self.sizes * self.decay + chosen.sum(0) * (1 - self.decay))
            ops.assign_add(self.sums, ops.matmul(chosen.T, x))
            self.codes[...] = self.sums / self.sizes.expand_dims(1)
        quantised = ops.matmul(chosen, self.codes) + self.prior(nearest)
        return x + ops.stop_gradient(quantised - x)


class Observer(nn.Cell):
    """Records the range of its inputs, as for quantisation."""

    writes = ("lowest", "highest", "batches")

    def __init__(self):
        super().__init__()
        self.lowest = state("lowest")
        self.highest = state("highest")
        self.batches = Parameter(Tensor(0, ms.int32), name="batches", requires_grad=False)
        self.frozen = state("frozen")

    def observe(self, x):
        self.lowest = ops.minimum(self.lowest, x.mean(0))
        self.highest.copy_(ops.maximum(self.highest, x.mean(0)))
        self.batches += 1

    def construct(self, x):
        if self.training:
            self.observe(x)
        return x * self.frozen


class StepCounter(nn.Cell):
    writes = ("count",)

    def __init__(self):
        super().__init__()
        self.count = Parameter(Tensor(0, ms.int32), name="count", requires_grad=False)
        self.frozen = state("frozen")

    def construct(self, x):
        self.count += 1
        y = x * self.frozen
        y += 1
        return y


def passing_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class JitCounter(StepCounter):
    @ms.jit
    def construct(self, x):
        ops.assign_add(self.count, 1)
        return x * self.frozen


class MomentumTeacher(nn.Cell):
    """MoCo's teacher, which follows the student; a frozen head beside it does not."""

    writes = ("teacher.weight", "teacher.bias")

    def __init__(self):
        super().__init__()
        self.student = nn.Dense(FEATURES, FEATURES)
        self.teacher = freeze(nn.Dense(FEATURES, FEATURES))
        self.head = freeze(nn.Dense(FEATURES, FEATURES))
        self.student_weights = ParameterTuple(self.student.get_parameters())
        self.teacher_weights = ParameterTuple(self.teacher.get_parameters())

    def update(self):
        for student, teacher in zip(self.student_weights, self.teacher_weights):
            ops.assign(teacher, 0.9 * teacher + 0.1 * student)

    def construct(self, x):
        self.update()
        return self.student(x) - self.teacher(self.head(x))


_follow = ops.MultitypeFuncGraph("follow")


@_follow.register("Tensor", "Tensor", "Tensor")
def _follow_tensor(momentum, teacher, student):
    return ops.assign(teacher, momentum * teacher + (1 - momentum) * student)


class MappedTeacher(MomentumTeacher):
    def __init__(self):
        super().__init__()
        self.momentum = Tensor(0.9, ms.float32)
        self.map = ops.HyperMap()

    def update(self):
        self.map(ops.partial(_follow, self.momentum), self.teacher_weights, self.student_weights)


class Queue(nn.Cell):
    """Keeps the keys of earlier batches."""

    writes = ("queue", "next")

    def __init__(self, length=20):
        super().__init__()
        self.length = length
        self.queue = state("queue", (length, FEATURES))
        self.next = Parameter(Tensor(0, ms.int32), name="next", requires_grad=False)
        self.frozen = state("frozen", (FEATURES, FEATURES))

    def enqueue(self, keys):
        n = keys.shape[0]
        self.queue[n : 2 * n] = keys
        ops.assign(self.next, (self.next + n) % self.length)

    def construct(self, x):
        keys = ops.matmul(x, self.frozen)
        similarity = ops.matmul(x, self.queue.T)
        self.enqueue(ops.stop_gradient(keys))
        return similarity


class ClampedConstant(nn.Cell):
    """Writes one trainable Parameter, and only reads another."""

    writes = ("constant",)

    def __init__(self):
        super().__init__()
        self.weight = state("weight", trainable=True)
        self.constant = state("constant", trainable=True)

    def construct(self, x):
        ops.assign(self.constant, ops.clamp(self.constant, -1.0, 1.0))
        x = x * self.weight
        return x * self.constant


class Buffered(nn.Cell):
    """Writes one buffer; another is constant."""

    writes = ("buffer seen",)

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", Tensor(np.zeros(FEATURES, np.float32)))
        self.register_buffer("mask", Tensor(np.ones(FEATURES, np.float32)))

    def construct(self, x):
        self.seen.copy_(x.mean(0))
        return x * self.mask


class Nested(nn.Cell):
    """Cells that write, at any depth of MindSpore's containers."""

    writes = ("blocks.0.count", "blocks.1.0.count", "blocks.1.1.lowest", "blocks.1.1.highest", "blocks.1.1.batches")

    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([StepCounter(), nn.SequentialCell(StepCounter(), Observer())])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ByLambda(nn.Cell):
    writes = ("last",)

    def __init__(self):
        super().__init__()
        self.last = state("last")
        self.frozen = state("frozen")
        self.keep = lambda last, x: ops.assign(last, x[0])

    def construct(self, x):
        self.keep(self.last, x)
        return x * self.frozen


class Histories(nn.Cell):
    """Has Parameters by number in a tuple, and by composed names."""

    writes = ("history_0", "history_1", "past.1")

    def __init__(self):
        super().__init__()
        self.history_0 = state("history_0")
        self.history_1 = state("history_1")
        self.past = ParameterTuple([state(f"past.{i}") for i in range(3)])
        self.frozen = state("frozen")

    def construct(self, x):
        for i in range(2):
            ops.assign(getattr(self, f"history_{i}"), x[i])
        ops.assign(self.past[1], x[0])
        return x * self.past[0] * self.frozen


def residual_network():
    """Returns a network of MindSpore's cells, as in the model collections. It writes BatchNorm's statistics."""
    block = nn.SequentialCell(nn.Conv2d(FEATURES, FEATURES, 3), nn.BatchNorm2d(FEATURES), nn.ReLU())
    return freeze(nn.SequentialCell(block, nn.Conv2d(FEATURES, 2, 1), nn.BatchNorm2d(2)))


RUNNABLE = [
    cls
    for cls in list(vars().values())
    if isinstance(cls, type) and issubclass(cls, nn.Cell) and hasattr(cls, "writes")
]
