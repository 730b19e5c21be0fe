"""
Cells that write their Parameter `u`, each in another way, and read `frozen` and `trained` only.

They are read and never run: that what they do is allowed in one mode only, or on no device at all, does not matter.
"""

import contextlib
import functools

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops

from support.forward_writing_networks import StepCounter, passing_on, state


class Writing(nn.Cell):
    def __init__(self):
        super().__init__()
        self.u = state("u")
        self.frozen = state("frozen")
        self.trained = state("trained", trainable=True)


class ByAlias(Writing):
    def construct(self, x):
        memory = ops.depend(self.u, x).view(-1)
        memory[0] = x
        return self.frozen + self.trained


class ByCastOfTheSameType(Writing):
    def construct(self, x):
        u = self.u.astype(x.dtype)
        u += self.frozen
        return x * self.trained


class ByOneOfTwoNames(Writing):
    def construct(self, x):
        target, source = self.u, self.trained
        ops.assign(target, source + self.frozen)
        return x


class ByWalrus(Writing):
    def construct(self, x):
        ops.assign((memory := self.u), memory + self.frozen)
        return x * self.trained


class ByChoice(Writing):
    def construct(self, x):
        memory = None
        if x.shape[0] > 1:
            memory = self.u
        if memory is not None:
            ops.assign(memory, self.frozen)
        return x * self.trained


class ByNameOfTheBranchBefore(Writing):
    def construct(self, x):
        y = None
        if x.shape[0] > 1:
            y = x * 2
        if y is not None:
            ops.assign(self.u, self.frozen)
        return x * self.trained


class OnRequest(Writing):
    also_written = ("v",)

    def __init__(self):
        super().__init__()
        self.v = state("v")

    def construct(self, x, update=False, memory=None):
        if update:
            ops.assign(self.u, self.frozen)
        if memory is not None:
            ops.assign(self.v, self.frozen)
        return x * self.trained


class OnAFlagThatMayChange(Writing):
    def __init__(self):
        super().__init__()
        self.enabled, self.momentum = False, None

    def construct(self, x):
        enabled = self.enabled
        if enabled:
            ops.assign(self.u, self.frozen)
        return x * self.trained


class OnRequestOfItsCaller(Writing):
    """The helper is called with both values."""

    def update(self, x, enabled=False):
        if enabled:
            ops.assign(self.u, x)
        return x

    def construct(self, x):
        return self.update(self.frozen) + self.update(self.trained, enabled=True)


class InLoops(Writing):
    def construct(self, x):
        memory = self.frozen
        while x.sum() > 0:
            for _ in range(2):
                ops.assign(memory, x) if memory is not self.frozen else None
                memory = self.u
        return x * self.trained

    also_written = ("frozen",)  # Conditions on objects are not followed.


class InTheSecondRoundOfALoop(Writing):
    def construct(self, x):
        memory = x
        for _ in range(2):
            ops.assign(memory, self.frozen)
            memory = self.u
        return x * self.trained


class AfterALoopThatMayNotRun(Writing):
    def construct(self, x):
        memory = self.u
        for _ in range(x.shape[0]):
            memory = x
        ops.assign(memory, self.frozen)
        return x * self.trained


class InTry(Writing):
    def construct(self, x):
        with contextlib.suppress(ValueError):
            try:
                memory = self.u
            except TypeError:
                memory = x
            finally:
                ops.assign(memory, self.frozen)
        return x * self.trained


class ByList(Writing):
    also_written = ("v",)

    def __init__(self):
        super().__init__()
        self.v = state("v")

    def construct(self, x):
        outputs, memories = [self.frozen], []
        memories.append(self.u)
        memories += [self.v]
        outputs += [self.trained]
        outputs[0] = x
        for memory in memories:
            ops.assign(memory, outputs[0])
        return x


class BySlice(Writing):
    def __init__(self):
        super().__init__()
        self.v = state("v")
        self.all = ParameterTuple([self.u, self.frozen])

    def construct(self, x):
        for memory in self.all[:1]:
            ops.assign(memory, x)
        next(iter(sorted((self.v,), key=len))).copy_(x)
        return x * self.trained

    also_written = ("frozen", "v")  # Which part a slice takes is not followed.


class ByDict(Writing):
    def construct(self, x):
        memories = {}
        memories["u"] = self.u
        for _, memory in memories.items():
            ops.assign(memory, self.frozen)
        return x * self.trained


class ByComprehension(Writing):
    def construct(self, x):
        memories = [memory for memory, _ in zip((self.u,), (self.frozen,))]
        _ = [ops.assign(memory, x) for _, memory in enumerate(memories)]
        return x * self.trained


class ByGenerator(Writing):
    def memories(self):
        yield self.u

    def construct(self, x):
        for memory in self.memories():
            ops.assign(memory, self.frozen)
        return x * self.trained


class ByAllThatAreNamedSo(Writing):
    def construct(self, x):
        for name, parameter in self.parameters_and_names(expand=False):
            if name == "u":
                parameter.set_data(x)
        return self.parameters_dict()["frozen"]

    also_written = ("frozen", "trained")  # Conditions on names are not followed.


class ByNameInParts(Writing):
    also_written = ("u_1", "u_2", "frozen", "trained")  # What such a name may be is hardly followed.

    def __init__(self):
        super().__init__()
        self.u_1, self.u_2 = state("u_1"), state("u_2")

    def construct(self, x):
        for name in ("u", "u_%d" % len(x), "{}_2".format("u")):  # noqa: UP031
            setattr(self, name, x)
        return getattr(self, "fro" + "zen") * self.trained


class ByStarred(Writing):
    also_written = ("frozen",)  # Which of them is which is not followed.

    def update(self, *memories, **others):
        write(*memories, **others)

    def construct(self, x):
        self.update(self.u, self.frozen)
        return x * self.trained


def write(memory, value):
    memory.copy_(value)


class ByDictOfArguments(Writing):
    def construct(self, x):
        write(**{"memory": self.u, "value": x})
        return x * self.trained * self.frozen


class ByClosure(Writing):
    def construct(self, x):
        memory = self.frozen

        def update(value, unused=self.trained):
            ops.assign(memory, value)

        memory = self.u
        update(x)
        return x


class ByClosureThatCallsItself(Writing):
    def construct(self, x):
        def construct(n):
            self.u.copy_(self.frozen)
            return construct(n - 1) if n > 0 else x

        return construct(3) * self.trained


class ByLambdaOfALoop(Writing):
    def construct(self, x):
        for memory in (self.u,):
            update = lambda value, memory=memory: ops.assign(memory, value)  # noqa: E731
            update(self.frozen)
        return x * self.trained


class ByLambdaThatHoldsAnother(Writing):
    def __init__(self):
        super().__init__()
        self.keep = lambda memory, x: (
            ops.assign(memory, x),
            lambda y: y,
        )

    def construct(self, x):
        self.keep(self.u, self.frozen)
        return x * self.trained


class ByPartial(Writing):
    def construct(self, x):
        functools.partial(write, self.u)(self.frozen)
        return x * self.trained


class ByPartialOfMindSpore(Writing):
    def construct(self, x):
        ops.partial(write, self.u)(value=self.frozen)
        return x * self.trained


class ByImport(Writing):
    def construct(self, x):
        from mindspore import ops as operators

        operators.assign(self.u, self.frozen)
        return x * self.trained


class WithinAGradient(Writing):
    def loss(self, x):
        ops.assign(self.u, self.frozen)
        return x * self.trained

    def construct(self, x):
        return ops.grad(self.loss)(x) + ops.GradOperation()(self.loss)(x)


class WithinALoopOfMindSpore(Writing):
    def construct(self, x):
        return ops.WhileLoop()(lambda u: (u + self.trained).sum() > 0, lambda u: u.copy_(self.frozen), self.u)


class Memory:
    """No Cell; it keeps a Parameter."""

    def __init__(self, parameter):
        self.parameter = parameter

    def update(self, x):
        self.parameter[...] = x

    def __call__(self, x):
        self.update(x)


class ByFunctionThatItWasGiven(Writing):
    def __init__(self, function=write):
        super().__init__()
        self.function = function

    def construct(self, x):
        return self.function(self.u, self.frozen) * self.trained


class ByConstructOfTheObject(Writing):
    def __init__(self):
        super().__init__()
        self.construct = lambda x: x if x is None else self.u.copy_(self.frozen)


class ByHelperObject(Writing):
    def __init__(self):
        super().__init__()
        self.memory = Memory(self.u)

    def construct(self, x):
        self.memory(self.frozen)
        return x * self.trained


class Writer(nn.Cell):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def write(self, memory, value):
        memory.copy_(value * self.rate)

    def construct(self, memory, value):
        self.write(memory, value)


class ByCellOfTheMoment(Writing):
    also_written = ("frozen",)  # What an object is made with, or given, all of its class may write.

    def construct(self, x):
        nn.ReLU()(self.frozen)
        writer = Writer(0.5)
        writer(self.u, self.frozen)
        return x * self.trained


class ByProperty(Writing):
    @property
    def weight(self):
        ops.assign(self.u, self.frozen)
        return self.trained

    def construct(self, x):
        return x * self.weight


class ByHook(Writing):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(3, 3)
        self.layer.register_forward_hook(self.keep)

    def keep(self, cell, inputs, output):
        ops.assign(self.u, output)

    def construct(self, x):
        return self.layer(x) * self.frozen * self.trained


class OfAnotherCell(Writing):
    also_written = ("counter.count",)

    def __init__(self):
        super().__init__()
        self.counter = StepCounter()
        self.counter.memory = state("memory")

    def construct(self, x):
        self.counter.count.set_data(self.counter.count + 1)
        self.u = self.frozen
        return x * self.trained


class WritingWhatItIsGiven(nn.Cell):
    def construct(self, memory, x):
        memory[0] = x
        return x


class ByCellThatIsGivenIt(Writing):
    def __init__(self):
        super().__init__()
        self.write = nn.SequentialCell(WritingWhatItIsGiven())
        self.cells_in_a_list = [WritingWhatItIsGiven()]

    def construct(self, x):
        self.cells_in_a_list[0](self.u, self.frozen)
        return x * self.trained


class InPlace(Writing):
    also_written = ("queue", "sums", "positive", "frozen")  # `print_` ends as what writes does.

    def __init__(self):
        super().__init__()
        self.queue = state("queue", (5, 3))
        self.sums, self.positive = state("sums"), state("positive")
        self.scatter = ops.ScatterNdUpdate()

    def construct(self, x):
        ops.scatter_update(self.u, Tensor([0], ms.int32), x)
        self.scatter(self.queue, Tensor([[0]], ms.int32), x)
        self.sums.add_(1.0)
        mint.nn.functional.relu_(self.positive)
        ops.print_(self.frozen)
        return x * self.frozen * self.trained


class ByBatchNormOfMindSpore(Writing):
    """The operator declares that it writes its scale and shift, too."""

    also_written = ("trained", "shift", "variance")

    def __init__(self):
        super().__init__()
        self.shift = state("shift", trainable=True)
        self.variance = state("variance")
        self.batch_norm = ops.BatchNorm(is_training=True)

    def construct(self, x):
        return self.batch_norm(x, self.trained, self.shift, self.u, self.variance)[0] * self.frozen


class ByBatchNormAsAFunction(Writing):
    also_written = ("variance",)

    def __init__(self):
        super().__init__()
        self.variance = state("variance")

    def construct(self, x):
        y = mint.nn.functional.batch_norm(x, self.u, self.variance, self.trained, training=self.training)
        return y * self.frozen


class ByTwoUpdates(Writing):
    """One map over tuples; another over lists that the network is asked for."""

    also_written = ("teacher.weight", "teacher.bias")

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Dense(3, 3), nn.Dense(3, 3)
        self.memories = ParameterTuple([self.u])

    def construct(self, x):
        for student, teacher in zip(self.student.get_parameters(), self.teacher.get_parameters()):
            teacher.set_data(0.9 * teacher + 0.1 * student)
        ops.Map()(write, self.memories, (self.frozen,))
        return self.student(x) * self.trained


class Decorated(Writing):
    @passing_on
    def update(self, x):
        ops.assign(self.u, x)

    @passing_on
    def construct(self, x):
        self.update(self.frozen)
        return x * self.trained


WAYS = Writing.__subclasses__()


class ReadingByItsParent(nn.Dense):
    """What it changes in place is a tensor, though it calls its parent with a Parameter."""

    def __init__(self):
        super().__init__(3, 3)
        self.frozen = state("frozen")

    def construct(self, x):
        x += 1
        return super().construct(self.frozen) + super().construct(x)


class ReadingByAGradient(nn.Cell):
    """What is changed in place is an input, though the gradient is given a Parameter."""

    def __init__(self):
        super().__init__()
        self.trained = state("trained", trainable=True)

    def loss(self, x):
        x += 1
        return x * self.trained

    def construct(self, x):
        return ops.value_and_grad(self.loss, None, (self.trained,))(x)


class ReadingOnly(nn.Cell):
    """A frozen network of 10 million weights in a user's own cell, through the operators that such cells use."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((3200, 3200), np.float32)), name="weight", requires_grad=False)
        self.bias, self.gamma, self.beta = state("bias", (3200,)), state("gamma"), state("beta")
        self.kernel = state("kernel", (64, 64, 3, 3))
        self.tokens = state("tokens", trainable=True)
        self.matmul, self.conv, self.norm = ops.MatMul(transpose_b=True), ops.Conv2D(64, 3), ops.LayerNorm()

    def construct(self, x):
        return self.products(x) + self.shapes(x) + self.normalised(x) + self.rebound(x) + self.chosen(x)

    def products(self, x):
        y = self.matmul(x, self.weight) + self.bias
        y = ops.dense(y, self.weight, self.bias) + mint.nn.functional.linear(y, self.weight, self.bias)
        y = ops.conv2d(y, self.kernel) + self.conv(y, self.kernel) + mint.nn.functional.conv2d(x, self.kernel)
        y = ops.bmm(y, self.weight) + mint.matmul(y, self.weight) + self.weight.matmul(y) + y.matmul(self.weight)
        y = ops.einsum("ij,jk->ik", y, self.weight) + mint.addmm(self.bias, x, self.weight)
        return ops.prelu(y, self.bias) + ops.bias_add(y, self.bias)

    def shapes(self, x):
        pieces = ops.split(self.weight, 2)
        joined = ops.concat((self.weight, self.weight)) + ops.stack([self.weight]) + pieces[0]
        turned = self.weight.reshape(3, -1).transpose(1, 0) + self.weight.view(-1, 10)
        cast = ops.cast(self.weight, ms.float16) + self.weight.to(ms.float16) + self.weight.astype(ms.float16)
        return joined + turned + cast + ops.stop_gradient(self.weight) * x

    def normalised(self, x):
        x = mint.nn.functional.relu(self.gamma) + mint.nn.functional.dropout(self.gamma)
        y = self.norm(x, self.gamma, self.beta)[0] + ops.layer_norm(x, (3,), self.gamma, self.beta)
        y = y + mint.nn.functional.layer_norm(y, (3,), self.gamma, self.beta)
        return mint.nn.functional.group_norm(y, 2, self.gamma, self.beta)

    def rebound(self, x):
        """What is changed in place here is a new tensor, whatever the name stood for before."""
        y = self.weight
        y = y * 2
        y += x
        tokens = self.tokens
        tokens = ops.concat((tokens, x))
        tokens[0] = x
        outputs = [self.weight]
        outputs[0] = x
        return y + tokens + outputs[0]

    def chosen(self, x):
        y = ops.gather(self.weight, x, 0) + mint.nn.functional.embedding(x, self.weight)
        y = y + ops.clip_by_value(self.weight, 0, 1) + ops.where(x > 0, self.weight, self.bias)
        y = y + ops.lerp(self.weight, self.weight, 0.5) + ops.interpolate(x, 2) + ops.relu(x)
        return y + ops.scatter(self.weight, 0, x, x) + ops.tensor_scatter_elements(self.weight, x, x)
