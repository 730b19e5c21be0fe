"""
The sides that are compared in each case, functions that make one step and return a tensor to wait for; and the process
that measures them, which prints JSON:

    python benchmarks/sides.py CASE MODE ROUNDS WHICH [SIDE]

WHICH is "few" or "all". Given the number of a SIDE, it measures the time of all, and builds that one first. Given a
SIDE's name, it measures its first call, its memory, and how many Python functions MindSpore parses for it.
"""

import json
import sys
from collections import Counter

from base import on_cpu, peak_memory, seconds_of, take_turns

# isort: split
import gan.network
import numpy as np
from common.lenet5 import LeNet5
from mindspore import GRAPH_MODE, Parameter, ParameterTuple, Tensor, amp, get_context, jit, nn, ops
from mindspore import dtype as mstype
from mindspore._extends.parse.parser import Parser

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, all_finite

rng = np.random.default_rng(0)


def normal(*shape):
    return Tensor(rng.standard_normal(shape).astype(np.float32))


def classified(network, shape, batch_size=32):
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.WithLossCell(network, loss), (
        normal(batch_size, *shape),
        ops.arange(batch_size).astype(mstype.int32) % 10,
    )


def lenet():
    """LeNet-5 on 28x28 images: 10 parameter tensors, 44 thousand values."""
    return classified(LeNet5(), (1, 28, 28))


def tiny():
    """Layers of 4 and 1: 4 parameter tensors, 25 values. Its step shows MindSpore's fixed cost, and what is added."""
    layers = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 1))
    return nn.WithLossCell(layers, nn.MSELoss()), (normal(8, 4), normal(8, 1))


def mlp():
    """7 layers of 1024: 14 parameter tensors, 6.3 million values."""
    layers = [layer for _ in range(6) for layer in (nn.Dense(1024, 1024), nn.ReLU())]
    return classified(nn.SequentialCell(*layers, nn.Dense(1024, 10)), (1024,))


class Narrow(nn.Cell):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(8, 8) for _ in range(layers - 1)])
        self.classify = nn.Dense(8, 10)

    def construct(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return self.classify(x)


def deep_narrow():
    """250 layers of 8: 500 small parameter tensors."""
    return classified(Narrow(250), (8,))


def convolution(channels_in, channels, stride=1, size=3):
    return nn.Conv2d(channels_in, channels, size, stride, pad_mode="pad", padding=size // 2)


class Block(nn.Cell):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1, self.norm1 = convolution(channels_in, channels, stride), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = convolution(channels, channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1:
            self.shortcut = nn.SequentialCell(convolution(channels_in, channels, stride, 1), nn.BatchNorm2d(channels))

    def construct(self, x):
        y = ops.relu(self.norm1(self.conv1(x)))
        return ops.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Cell):
    """He et al., `Deep residual learning for image recognition`, with the usual first layer for 32x32 images."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = convolution(3, 64), nn.BatchNorm2d(64)
        widths = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
        self.blocks = nn.SequentialCell(*(Block(before, after, after // before) for before, after in widths))
        self.classify = nn.Dense(512, 10)

    def construct(self, images):
        x = self.blocks(ops.relu(self.norm(self.conv(images))))
        return self.classify(x.mean(axis=(2, 3)))


def resnet18():
    """ResNet-18 on 32x32 images, batch 8: 62 parameter tensors, 11 million values."""
    return classified(ResNet18(), (3, 32, 32), batch_size=8)


def dcgan():
    """The losses of the GAN example's discriminator and generator, both networks, and a batch of images and noise."""
    networks = generator, discriminator = gan.network.Generator(64, 24), gan.network.Discriminator(24)
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    return networks, (ops.tanh(normal(32, 1, 28, 28)), normal(32, 64))


def momentum(network):
    return nn.Momentum(network.trainable_params(), learning_rate=1e-4, momentum=0.9)


def in_graph_mode(function):
    return jit(function) if get_context("mode") == GRAPH_MODE else function


def stock(network, inputs, weights_of=None):
    """MindSpore's cell, which scales nothing and checks nothing."""
    cell = nn.TrainOneStepCell(network, momentum(weights_of or network)).set_train()
    return lambda: cell(*inputs)


def scaled(network, inputs, **keywords):
    """This package's cell with dynamic scale, check and transaction."""
    keywords = {"loss_scale": DynamicLossScale(), **keywords}
    cell = ScaledTrainOneStepCell(network, momentum(network), **keywords).set_train()
    return lambda: cell(*inputs)[0]


def recipe(network, inputs, weights_of=None, compiled=in_graph_mode):
    """The hand-written step of MindSpore's tutorial on mixed precision."""
    optimizer = momentum(weights_of or network)
    loss_scaler = amp.DynamicLossScaler(scale_value=2**16, scale_factor=2, scale_window=2000)
    network.set_train()

    def forward(*inputs):
        return loss_scaler.scale(network(*inputs))

    value_and_grad = ops.value_and_grad(forward, None, optimizer.parameters)

    def step(*inputs):
        loss, grads = value_and_grad(*inputs)
        is_finite = amp.all_finite(grads)
        if is_finite:
            grads = loss_scaler.unscale(grads)
            loss = ops.depend(loss, optimizer(grads))
        loss_scaler.adjust(is_finite)
        return loss_scaler.unscale(loss)

    step = compiled(step)
    return lambda: step(*inputs)


def functional(network, inputs, compiled=in_graph_mode):
    """A step written with functions, as the recipe is, around this package's ManualStep."""
    manual_step = ManualStep(network.set_train(), momentum(network), DynamicLossScale())
    value_and_grad = manual_step.value_and_grad(network)

    def step(*inputs):
        loss, grads = value_and_grad(*manual_step.begin(*inputs))
        return ops.depend(loss, manual_step.end(grads))

    step = compiled(step)
    return lambda: step(*inputs)


def total(tensor):
    if tensor.ndim > 2:
        tensor = tensor.reshape((tensor.shape[0], -1))
    if tensor.ndim > 1:
        tensor = ops.ReduceSum()(tensor, (-1,))
    return ops.ReduceSum()(tensor, ())


def times(factor, tensor):
    return tensor * factor


class ByHand(nn.TrainOneStepCell):
    """
    A step written for one float32 network, with the promises of this package that its author would think of: scaled in
    float32, gradients and BatchNorm's statistics checked by their sums, dynamic scale, one branch, statistics put back.
    """

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.scale = Parameter(Tensor(2.0**16, mstype.float32), name="scale", requires_grad=False)
        self.clean_steps = Parameter(Tensor(0, mstype.int32), name="clean_steps", requires_grad=False)
        self.state = ParameterTuple([each for each in network.get_parameters() if not each.requires_grad])
        self.map = ops.HyperMap()
        self.value_and_grad = ops.value_and_grad(self.scaled_loss, None, self.weights, has_aux=True)
        self.zero, self.window = Tensor(0, mstype.int32), Tensor(2000, mstype.int32)

    def scaled_loss(self, scale, *inputs):
        loss = self.network(*inputs)
        return loss * scale, loss

    def construct(self, *inputs):
        scale, saved = ops.deepcopy(self.scale), ()
        if self.state:
            saved = self.map(ops.deepcopy, self.state)
            inputs = ops.depend(inputs, saved)
        (_, loss), grads = self.value_and_grad(scale, *inputs)
        grads = self.map(ops.partial(times, 1.0 / scale), grads)
        totals = self.map(total, grads)
        if self.state:
            totals += self.map(total, self.state)
        overflow = ops.logical_not(ops.isfinite(ops.addn(totals)))
        clean_steps = ops.select(overflow, self.zero, self.clean_steps + 1)
        grows = clean_steps >= self.window
        ops.assign(self.scale, ops.select(overflow, scale * 0.5, ops.select(grows, scale * 2.0, scale)))
        ops.assign(self.clean_steps, ops.select(grows, self.zero, clean_steps))
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads))
        elif self.state:
            loss = ops.depend(loss, self.map(ops.assign, self.state, saved))
        return loss


def by_hand(network, inputs):
    """What a user would otherwise write."""
    cell = ByHand(network, momentum(network)).set_train()
    return lambda: cell(*inputs)


def check_and_unscale(network, _):
    """Only the check and the unscaling, of gradients that exist already."""
    weights = network.trainable_params()
    grads = ParameterTuple(Parameter(weight.value(), name=f"gradient.{weight.name}") for weight in weights)
    for_each, scale = ops.HyperMap(), Tensor(2.0**16, mstype.float32)

    def step(scale):
        unscaled = for_each(ops.partial(times, 1.0 / scale), grads)
        return ops.depend(all_finite(unscaled), unscaled)

    step = in_graph_mode(step)
    return lambda: step(scale)


def forward_and_backward(network, inputs):
    """Only forward and backward."""
    value_and_grad = ops.value_and_grad(network.set_train(), None, ParameterTuple(network.trainable_params()))

    def step(*inputs):
        loss, grads = value_and_grad(*inputs)
        return ops.depend(loss, grads)

    step = in_graph_mode(step)
    return lambda: step(*inputs)


def one_by_one(networks, inputs, side=stock):
    """A GAN without this package: the discriminator's step and the generator's."""
    (generator, discriminator), (_, noise) = networks, inputs
    discriminate = side(gan.network.DiscriminatorLoss(*networks), inputs, discriminator)
    generate = side(gan.network.GeneratorLoss(*networks), (noise,), generator)
    return lambda: (discriminate(), generate())[1]


def simultaneous(networks, inputs, **keywords):
    """Both networks in one cell, with one check, one update, and one forward of the generator."""
    optimizers = [momentum(network) for network in reversed(networks)]
    both = gan.network.BothLosses(*networks)
    cell = SimultaneousTrainOneStepCell(both, optimizers, DynamicLossScale(), **keywords).set_train()
    return lambda: cell(*inputs)[0]


def six_tensors():
    return [normal(1024, 1024) for _ in range(6)]


def check_of(*tensors, check=all_finite):
    # Each tensor is an argument of its own: a tuple would be a constant, and the result computed when compiling.
    def checked(*tensors):
        return check(tensors)

    checked = in_graph_mode(checked)
    return lambda: checked(*tensors)


def of(side, make, /, **keywords):
    return lambda: side(*make(), **keywords)


BY_HAND, CHECK_ALONE = "by hand", "check and unscale"
# For each case, the side that the others are compared to comes first.
CASES = {
    make.__name__: {
        "stock": of(stock, make),
        "ms_lossscale": of(scaled, make),
        BY_HAND: of(by_hand, make),
        "recipe": of(recipe, make),
        CHECK_ALONE: of(check_and_unscale, make),
    }
    for make in (tiny, lenet, mlp, deep_narrow, resnet18)
}
# In float32, nothing overflows here: retries only cost that they are allowed.
for make in (lenet, mlp, resnet18):
    sides = {"max_retries=0": of(scaled, make), "ms_lossscale": of(scaled, make, max_retries=3)}
    CASES[f"{make.__name__}_retries"] = sides
# fmt: off
CASES.update({name: dict(zip((reference, "ms_lossscale", "recipe"), sides)) for name, reference, *sides in (
    ("unscaled", "stock", of(stock, tiny), of(scaled, tiny, loss_scale=None)),
    ("dcgan", "stock", of(one_by_one, dcgan), of(simultaneous, dcgan), of(one_by_one, dcgan, side=recipe)),
    # A call that only adds gradients to its accumulation cycle, which never ends here.
    ("accumulation", "forward and backward", of(forward_and_backward, mlp),
     of(scaled, mlp, gradient_accumulation_steps=10**6)),
    ("check", "amp.all_finite", of(check_of, six_tensors, check=amp.all_finite), of(check_of, six_tensors)),
    # Steps written with functions; the second one compiles them in PyNative mode, too.
    ("functional", "amp.DynamicLossScaler", of(recipe, mlp), of(functional, mlp)),
    ("functional_jit", "amp.DynamicLossScaler", of(recipe, mlp, compiled=jit), of(functional, mlp, compiled=jit)),
    ("dcgan_retries", "max_retries=0", of(simultaneous, dcgan), of(simultaneous, dcgan, max_retries=3)),
)})
# fmt: on


def sides_of(case, mode="graph", which="few"):
    """Returns the sides of a case, all or the most important ones."""
    # In PyNative mode, the check alone would run operator by operator, unlike the cell.
    left_out = {CHECK_ALONE: mode != "graph" or which == "few", "recipe": which == "few"}
    return {name: side for name, side in CASES[case].items() if not left_out.get(name)}


def main(case, mode, rounds, which, side):
    on_cpu(mode)
    sides = sides_of(case, mode, which)
    if side.isdigit():
        return take_turns(sides, int(rounds), int(side))
    modules, init = Counter(), Parser.__init__

    def counting(self, function, *args, **kwargs):
        modules[(getattr(function, "__module__", None) or "").partition(".")[0] == "ms_lossscale"] += 1
        init(self, function, *args, **kwargs)

    step = sides[side]() if side in sides else scaled(*globals()[case](), loss_scale=None)
    Parser.__init__ = counting
    seconds, parsed = seconds_of(step), [modules[True], modules[False]]
    first_peak, _ = peak_memory(), seconds_of(step, 10)
    return {"seconds": seconds, "parsed": parsed, "first_peak": first_peak, "peak": peak_memory()}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
