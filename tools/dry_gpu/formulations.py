"""
What parts the forward from the backward in a compiled step on a GPU: a branch on what the forward wrote. Prints for ways
of writing a step how many kernels it launches, how many of them are fused, and how many Transposes there are.

    python formulations.py [WAY ...]
"""

import sys
from collections import Counter

import dry_gpu

launches = dry_gpu.Launches()
import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype


class Net(nn.Cell):
    def __init__(self, blocks=2, width=16):
        super().__init__()
        cells = [nn.Conv2d(4, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
        for _ in range(blocks):
            cells += [nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
        self.body, self.head = nn.SequentialCell(*cells).to_float(mstype.float16), nn.Dense(width, 10)

    def construct(self, x, labels):
        hidden = ops.mean(self.body(x).astype(mstype.float32), (2, 3))
        return ops.cross_entropy(self.head(hidden), labels)


def times(factor, tensor):
    return tensor * factor


class Step(nn.Cell):
    """A scaled step; its subclasses differ in how they look at BatchNorm's statistics."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        self.statistics = mindspore.ParameterTuple([p for p in network.get_parameters() if not p.requires_grad])
        self.value_and_grad = ops.value_and_grad(self.scaled_loss, None, self.optimizer.parameters, has_aux=True)
        self.map = ops.HyperMap()
        self.scale = mindspore.Parameter(Tensor(1024.0), name="scale", requires_grad=False)

    def scaled_loss(self, *inputs):
        loss = self.network(*inputs)
        return loss * self.scale, loss

    def finite(self):
        total = Tensor(0.0, mstype.float32)
        for each in self.statistics:
            total = total + each.sum()
        return ops.isfinite(total)

    def looked(self, grads):
        return ops.isfinite(grads[0].sum())

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        if self.looked(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class WithoutBranch(Step):
    """One more check, by operators only."""

    def looked(self, grads):
        return ops.logical_and(self.finite(), ops.isfinite(grads[0].sum()))


class BranchAnywhere(Step):
    """A branch on what the forward wrote: MindSpore puts it between forward and backward."""

    def looked(self, grads):
        finite = self.finite()
        if ops.logical_not(finite):
            finite = ops.isfinite(self.statistics[0].max())
        return ops.logical_and(finite, ops.isfinite(grads[0].sum()))


class BranchSecond(Step):
    """The same, named second in the last operator: which of the two comes first is MindSpore's choice."""

    def looked(self, grads):
        finite = self.finite()
        if ops.logical_not(finite):
            finite = ops.isfinite(self.statistics[0].max())
        return ops.logical_and(ops.isfinite(grads[0].sum()), finite)


class BranchOnLoss(Step):
    """A branch on the loss, as one that only updates where the loss is small."""

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        factor = self.scale * 1.0
        if loss > 100.0:
            factor = self.scale * 2.0
        if self.looked(grads):
            loss = ops.depend(loss, self.optimizer(self.map(ops.partial(times, 1.0 / factor), grads)))
        return loss


class UnscaledInBranch(Step):
    """The scaled gradients are checked; they are unscaled where they are used."""

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        if self.looked(grads):
            loss = ops.depend(loss, self.optimizer(self.map(ops.partial(times, 1.0 / self.scale), grads)))
        return loss


class UnscaledBefore(Step):
    """The gradients are unscaled, then checked."""

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        grads = self.map(ops.partial(times, 1.0 / self.scale), grads)
        if self.looked(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class BranchAfterBackward(Step):
    """The same branch, which waits for the gradients."""

    def looked(self, grads):
        finite = self.finite()
        if ops.depend(ops.logical_not(finite), grads):
            finite = ops.isfinite(self.statistics[0].max())
        return ops.logical_and(finite, ops.isfinite(grads[0].sum()))


class StandardGrad(Step):
    """The loss by one call of the network, the gradients by another with a `sens`, as MindSpore's own cell does."""

    def __init__(self, network):
        super().__init__(network)
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)(network, self.optimizer.parameters)

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(*inputs, ops.ones_like(loss) * self.scale)
        if self.looked(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class DividedLoss(Step):
    """The loss is the scaled one, divided."""

    def __init__(self, network):
        super().__init__(network)
        self.plain = ops.value_and_grad(self.only_scaled, None, self.optimizer.parameters)

    def only_scaled(self, *inputs):
        return self.network(*inputs) * self.scale

    def construct(self, *inputs):
        loss, grads = self.plain(*inputs)
        if self.looked(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss / self.scale


def stock(network):
    return nn.TrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.01, 0.9))


WAYS = {
    "MindSpore's unscaled cell": stock,
    "loss as aux": Step,
    "loss divided by the scale": DividedLoss,
    "grad with sens beside the forward": StandardGrad,
    "aux, statistics checked without a branch": WithoutBranch,
    "aux, statistics checked in a branch": BranchAnywhere,
    "the same, second in an operator": BranchSecond,
    "aux, a branch on the loss": BranchOnLoss,
    "aux, unscaled before the check": UnscaledBefore,
    "aux, unscaled in the branch": UnscaledInBranch,
    "aux, statistics checked in a branch after the gradients": BranchAfterBackward,
}
mindspore.set_context(mode=mindspore.GRAPH_MODE)
mindspore.set_device("GPU")
x, labels = Tensor(np.ones((4, 4, 16, 16), np.float32)), Tensor(np.zeros(4, np.int32))
FUSED, SINGLE = (
    ("BatchNormWithActivation", "BatchNormGradWithActivation"),
    ("BatchNorm", "BatchNormGrad", "ReLU", "ReluGrad"),
)
print(
    "| way | kernels | " + " | ".join((*FUSED, *SINGLE, "Transpose", "TensorMove", "Mul")) + " |\n|---|" + "---:|" * 10
)
for name, make in WAYS.items():
    if len(sys.argv) > 1 and name not in sys.argv[1:]:
        continue
    mindspore.set_seed(0)
    step = make(Net()).set_train()
    for _ in range(2):
        step(x, labels)
    mindspore.runtime.synchronize()
    launches.reset()
    step(x, labels)
    mindspore.runtime.synchronize()
    found = Counter(launches.names())
    print(
        f"| {name} | {sum(found.values())} | "
        + " | ".join(str(found[each]) for each in (*FUSED, *SINGLE, "Transpose", "TensorMove", "Mul"))
        + " |",
        flush=True,
    )
    if len(sys.argv) > 1:
        print(dict(found))
