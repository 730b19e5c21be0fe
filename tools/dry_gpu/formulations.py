"""
Ways to write a scaled step of a small convolutional network, and what MindSpore makes of each on a GPU: how many
kernels it launches, and how many of them are fused. A branch on what the forward wrote can part the forward from the
backward, so that nothing is fused across it; returning the unscaled loss as well costs nothing.

    python tools/dry_gpu/formulations.py
    python tools/dry_gpu/formulations.py "loss as aux" "aux, unscaled in the branch"
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import dry_gpu

sys.path.append(str(Path(__file__).resolve().parents[1]))

# isort: split
import mindspore
import numpy as np
from dry.tables import show, table
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype


class Network(nn.Cell):
    """Three convolutions in float16, each with BatchNorm and ReLU, and a loss."""

    def __init__(self, width=16):
        super().__init__()
        layers = []
        for channels in (4, width, width):
            layers += [nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.SequentialCell(*layers).to_float(mstype.float16)
        self.head = nn.Dense(width, 10)

    def construct(self, x, labels):
        hidden = ops.mean(self.body(x).astype(mstype.float32), (2, 3))
        return ops.cross_entropy(self.head(hidden), labels)


def times(factor, tensor):
    return tensor * factor


class Step(nn.Cell):
    """A scaled step with the loss as aux. Its subclasses differ in how they look at BatchNorm's statistics."""

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

    def sum_is_finite(self):
        total = Tensor(0.0, mstype.float32)
        for each in self.statistics:
            total = total + each.sum()
        return ops.isfinite(total)

    def gradient_is_finite(self, grads):
        return ops.isfinite(grads[0].sum())

    def is_finite(self, grads):
        return self.gradient_is_finite(grads)

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        if self.is_finite(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class DividedLoss(Step):
    """The loss is the scaled one, divided."""

    def __init__(self, network):
        super().__init__(network)
        self.without_aux = ops.value_and_grad(self.only_scaled_loss, None, self.optimizer.parameters)

    def only_scaled_loss(self, *inputs):
        return self.network(*inputs) * self.scale

    def construct(self, *inputs):
        loss, grads = self.without_aux(*inputs)
        if self.is_finite(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss / self.scale


class SenseParameter(Step):
    """The loss by one call of the network, the gradients by another with a `sens`, as MindSpore's own cell does."""

    def __init__(self, network):
        super().__init__(network)
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)(network, self.optimizer.parameters)

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(*inputs, ops.ones_like(loss) * self.scale)
        if self.is_finite(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class StatisticsWithoutBranch(Step):
    """One more check, by operators alone."""

    def is_finite(self, grads):
        return ops.logical_and(self.sum_is_finite(), self.gradient_is_finite(grads))


class StatisticsInBranch(Step):
    """A branch on what the forward wrote: MindSpore puts it between forward and backward."""

    def is_finite(self, grads):
        finite = self.sum_is_finite()
        if ops.logical_not(finite):
            finite = ops.isfinite(self.statistics[0].max())
        return ops.logical_and(finite, self.gradient_is_finite(grads))


class StatisticsInBranchSecond(Step):
    """The same, named second in the last operator: which of the two comes first is MindSpore's choice."""

    def is_finite(self, grads):
        finite = self.sum_is_finite()
        if ops.logical_not(finite):
            finite = ops.isfinite(self.statistics[0].max())
        return ops.logical_and(self.gradient_is_finite(grads), finite)


class StatisticsInBranchLast(Step):
    """The same branch, which waits for the gradients."""

    def is_finite(self, grads):
        finite = self.sum_is_finite()
        if ops.depend(ops.logical_not(finite), grads):
            finite = ops.isfinite(self.statistics[0].max())
        return ops.logical_and(finite, self.gradient_is_finite(grads))


class BranchOnLoss(Step):
    """A branch on the loss, as in a step that treats large losses in another way."""

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        factor = self.scale * 1.0
        if loss > 100.0:
            factor = self.scale * 2.0
        if self.is_finite(grads):
            loss = ops.depend(loss, self.optimizer(self.map(ops.partial(times, 1.0 / factor), grads)))
        return loss


class UnscaledBefore(Step):
    """The gradients are unscaled, then checked."""

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        grads = self.map(ops.partial(times, 1.0 / self.scale), grads)
        if self.is_finite(grads):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class UnscaledInBranch(Step):
    """The scaled gradients are checked; they are unscaled where they are used."""

    def construct(self, *inputs):
        (_, loss), grads = self.value_and_grad(*inputs)
        if self.is_finite(grads):
            loss = ops.depend(loss, self.optimizer(self.map(ops.partial(times, 1.0 / self.scale), grads)))
        return loss


def unscaled(network):
    return nn.TrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.01, 0.9))


WAYS = {
    "MindSpore's unscaled cell": unscaled,
    "loss as aux": Step,
    "loss divided by the scale": DividedLoss,
    "gradients with sens, beside the forward": SenseParameter,
    "aux, statistics checked without a branch": StatisticsWithoutBranch,
    "aux, statistics checked in a branch": StatisticsInBranch,
    "the same, second in an operator": StatisticsInBranchSecond,
    "the same, after the gradients": StatisticsInBranchLast,
    "aux, a branch on the loss": BranchOnLoss,
    "aux, unscaled before the check": UnscaledBefore,
    "aux, unscaled in the branch": UnscaledInBranch,
}
KERNELS = (
    *("BatchNormWithActivation", "BatchNormGradWithActivation", "BatchNorm", "BatchNormGrad", "ReLU", "ReluGrad"),
    *("Transpose", "TensorMove", "Mul", "CombineScaleMomentum"),
)


def counted(make):
    """Returns how often a step launches each kernel."""
    inputs = Tensor(np.ones((4, 4, 16, 16), np.float32)), Tensor(np.zeros(4, np.int32))
    step = make(Network()).set_train()
    for _ in range(2):
        step(*inputs)
    mindspore.runtime.synchronize()
    dry_gpu.reset()
    step(*inputs)
    mindspore.runtime.synchronize()
    return Counter(dry_gpu.kernels())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="WAY", help=f"default: all of {', '.join(WAYS)}")
    parser.add_argument("--output", metavar="FILE", help="add the table to this file, below the command")
    args = parser.parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("GPU")
    rows = []
    for name in args.ways:
        found = counted(WAYS[name])
        print(f"{name}: {sum(found.values())} kernels", file=sys.stderr, flush=True)
        rows.append([name, sum(found.values()), *(found[kernel] for kernel in KERNELS)])
    show(table(["way", "kernels", *KERNELS], rows), args.output)


if __name__ == "__main__":
    main()
