"""
The sides that are compared in each case, functions that make one step; and the process that measures them, which prints
JSON:

    python benchmarks/sides.py DEVICE CASE MODE ROUNDS SIDE ...

With 0 rounds it measures the first call of the only side, its memory, and how many Python functions MindSpore parses
for it. Otherwise it builds the sides in this order and measures the time of all.
"""

import itertools
import json
import sys
from collections import Counter
from functools import partial

from base import peak_memory, seconds_of, take_turns, use

# isort: split
import gan.network
import large
from common.lenet5 import LeNet5
from large import normal
from mindspore import GRAPH_MODE, Parameter, ParameterTuple, Tensor, amp, get_context, jit, nn, ops
from mindspore import dtype as mstype
from mindspore._extends.parse.parser import Parser

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, all_finite

SCRIPT = __file__


def classified(network, shape, batch_size=32):
    labels = ops.arange(batch_size).astype(mstype.int32) % 10
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.WithLossCell(network, loss), (normal(batch_size, *shape), labels)


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


def deep_narrow():
    """250 layers of 8: 500 small parameter tensors."""
    layers = [nn.Dense(8, 8, activation="tanh") for _ in range(249)]
    return classified(nn.SequentialCell(*layers, nn.Dense(8, 10)), (8,))


def convolution(channels_in, channels, stride=1, size=3):
    layer = nn.Conv2d(channels_in, channels, size, stride, pad_mode="pad", padding=size // 2)
    return nn.SequentialCell(layer, nn.BatchNorm2d(channels))


class Block(nn.Cell):
    def __init__(self, channels_in, channels):
        super().__init__()
        stride = channels // channels_in
        self.first, self.second = convolution(channels_in, channels, stride), convolution(channels, channels)
        self.shortcut = nn.Identity() if stride == 1 else convolution(channels_in, channels, stride, 1)

    def construct(self, x):
        return ops.relu(self.second(ops.relu(self.first(x))) + self.shortcut(x))


def resnet18():
    """
    ResNet-18 (He et al., `Deep residual learning for image recognition`) with the usual first layer for 32x32 images,
    batch 8: 62 parameter tensors, 11 million values.
    """
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = map(Block, widths, widths[1:])
    layers = [convolution(3, 64), nn.ReLU(), *blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Dense(512, 10)]
    return classified(nn.SequentialCell(*layers), (3, 32, 32), batch_size=8)


def dcgan():
    """The GAN example's networks, and a batch of images and noise."""
    networks = generator, discriminator = gan.network.Generator(64, 24), gan.network.Discriminator(24)
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    return networks, (ops.tanh(normal(32, 1, 28, 28)), normal(32, 64))


def momentum(network):
    return nn.Momentum(network.trainable_params(), learning_rate=1e-4, momentum=0.9)


def compiled(function):
    return jit(function) if get_context("mode") == GRAPH_MODE else function


def stock(network, weights_of=None):
    """MindSpore's cell, which scales nothing and checks nothing."""
    return nn.TrainOneStepCell(network, momentum(weights_of or network)).set_train()


def stock_scaled(network, weights_of=None):
    """MindSpore's cell with dynamic scale and check, which CPU refuses."""
    update = nn.DynamicLossScaleUpdateCell(2**16, scale_factor=2, scale_window=2000)
    return nn.TrainOneStepWithLossScaleCell(network, momentum(weights_of or network), update).set_train()


def scaled(network, **keywords):
    """This package's cell with dynamic scale, check and transaction."""
    keywords = {"loss_scale": DynamicLossScale(), **keywords}
    return ScaledTrainOneStepCell(network, momentum(network), **keywords).set_train()


def recipe(network, weights_of=None):
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

    return compiled(step)


def functional(network):
    """A step written with functions, as the recipe is, around this package's ManualStep."""
    manual_step = ManualStep(network.set_train(), momentum(network), DynamicLossScale())
    value_and_grad = manual_step.value_and_grad(network)

    def step(*inputs):
        loss, grads = value_and_grad(*manual_step.begin(*inputs))
        return ops.depend(loss, manual_step.end(grads))

    return compiled(step)


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
    A step that a user would otherwise write for one float32 network, with the promises that come to mind: scaled in
    float32, gradients and BatchNorm's statistics checked by their sums, dynamic scale, one branch, statistics put back.
    """

    def __init__(self, network):
        super().__init__(network, momentum(network))
        self.scale = Parameter(Tensor(2.0**16, mstype.float32), name="scale", requires_grad=False)
        self.clean_steps = Parameter(Tensor(0, mstype.int32), name="clean_steps", requires_grad=False)
        self.state = ParameterTuple([each for each in network.get_parameters() if not each.requires_grad])
        self.map = ops.HyperMap()
        self.value_and_grad = ops.value_and_grad(self.scaled_loss, None, self.weights, has_aux=True)
        self.zero, self.window = Tensor(0, mstype.int32), Tensor(2000, mstype.int32)
        self.set_train()

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


def check_and_unscale(network):
    """Only the check and the unscaling, of gradients that exist already."""
    grads = ParameterTuple(Parameter(each.value(), name=f"gradient.{each.name}") for each in network.trainable_params())
    for_each, scale = ops.HyperMap(), Tensor(2.0**16, mstype.float32)

    def step(scale):
        unscaled = for_each(ops.partial(times, 1.0 / scale), grads)
        return ops.depend(all_finite(unscaled), unscaled)

    step = compiled(step)
    return lambda *_: step(scale)


def forward_and_backward(network):
    """Only forward and backward."""
    value_and_grad = ops.value_and_grad(network.set_train(), None, ParameterTuple(network.trainable_params()))

    def step(*inputs):
        loss, grads = value_and_grad(*inputs)
        return ops.depend(loss, grads)

    return compiled(step)


def one_by_one(networks, side=stock):
    """A GAN without this package: the discriminator's step and the generator's."""
    generator, discriminator = networks
    discriminate = side(gan.network.DiscriminatorLoss(*networks), discriminator)
    generate = side(gan.network.GeneratorLoss(*networks), generator)
    return lambda images, noise: (discriminate(images, noise), generate(noise))[1]


def simultaneous(networks, **keywords):
    """Both networks in one cell, with one check, one update, and one forward of the generator."""
    both, optimizers = gan.network.BothLosses(*networks), list(map(momentum, reversed(networks)))
    return SimultaneousTrainOneStepCell(both, optimizers, DynamicLossScale(), **keywords).set_train()


def of_new_shapes(side, knows_shapes, network):
    """Each batch has another size. The cell may know which dimension varies."""
    cell = side(network)
    batches = ([ops.ones((size, width)) for width in (4, 1)] for size in itertools.count(1))
    if knows_shapes:
        cell.set_inputs(*(Tensor(shape=[None, width], dtype=mstype.float32) for width in (4, 1)))
    return lambda *_: cell(*next(batches))


def looped(side, count, network):
    """So many steps with one call."""
    cell = side(network)

    def loop(images, labels, count):
        # A loop's variables must exist before it, in the same shape.
        loss = images.sum()
        while count > 0:
            output = cell(images, labels)
            loss = output[0] if isinstance(output, tuple) else output
            count = count - 1
        return loss

    loop = compiled(loop)
    return lambda *inputs: loop(*inputs, Tensor(count))


OURS, RECIPE, CHECK_ALONE, UNSCALED = "ms_lossscale", "recipe", "check and unscale", "loss_scale=None"
STOCK_SCALED, RETRIED = "stock with loss scale", "max_retries=3"
BOTH = {"stock": stock, OURS: scaled}
unscaled = partial(scaled, loss_scale=None)
OTHERS = {STOCK_SCALED: stock_scaled, "by hand": ByHand, UNSCALED: unscaled}
ALL = {**BOTH, **OTHERS, RECIPE: recipe, CHECK_ALONE: check_and_unscale}
# For each case, what makes the network and a batch, and the sides, which make the step from the network. The one that
# the others are compared to comes first.
CASES = {make.__name__: (make, ALL) for make in (tiny, lenet, mlp, deep_narrow, resnet18)}
CASES["unscaled"] = tiny, {"stock": stock, OURS: unscaled}
ways = {name: partial(one_by_one, side=side) for name, side in ((STOCK_SCALED, stock_scaled), (RECIPE, recipe))}
for make in (dcgan, large.dcgan128):
    CASES[make.__name__] = make, {"stock": one_by_one, OURS: simultaneous, **ways}
for make in (large.resnet50, large.transformer):
    CASES[make.__name__] = make, {**BOTH, **OTHERS, RETRIED: partial(scaled, max_retries=3)}
# The same kinds of networks, small enough for a CPU.
SMALL = {
    "resnet50_small": ("resnet50", partial(large.resnet50, 2, 32, (1, 1))),
    "resnet50_deep": ("resnet50", partial(large.resnet50, 2, 32)),
    "transformer_small": ("transformer", partial(large.transformer, 2, 16, 2, 128, 100)),
    "dcgan128_small": ("dcgan128", partial(large.dcgan128, 4, 8)),
}
CASES.update({name: (make, CASES[case][1]) for name, (case, make) in SMALL.items()})
# A call that only adds gradients to its accumulation cycle, which never ends here.
adding = partial(scaled, gradient_accumulation_steps=10**6)
CASES["accumulation"] = mlp, {"forward and backward": forward_and_backward, OURS: adding}
CASES["functional"] = mlp, {"amp.DynamicLossScaler": recipe, OURS: functional}
# In float32, nothing overflows here: retries only cost that they are allowed.
for make, side in ((lenet, scaled), (mlp, scaled), (resnet18, scaled), (dcgan, simultaneous)):
    CASES[f"{make.__name__}_retries"] = make, {"max_retries=0": side, OURS: partial(side, max_retries=3)}
for count in (1, 8, 64):
    CASES[f"steps_per_call_{count}"] = lenet, {name: partial(looped, side, count) for name, side in BOTH.items()}
more = {**BOTH, "with clip_norm and ema_decay": partial(scaled, clip_norm=1.0, ema_decay=0.9)}
for name, knows in (("new_shapes", False), ("new_shapes_set_inputs", True)):
    CASES[name] = tiny, {its: partial(of_new_shapes, side, knows) for its, side in more.items()}


def begin(case, side):
    """Returns a function that makes a step."""
    make, sides = CASES[case]
    network, inputs = make()
    step = sides[side](network)
    return lambda: step(*inputs)


def main(device, case, mode, rounds, *sides):
    use(device, mode)
    if int(rounds):
        return take_turns({side: partial(begin, case, side) for side in sides}, int(rounds))
    modules, init = Counter(), Parser.__init__

    def counting(self, function, *args, **kwargs):
        modules[(getattr(function, "__module__", None) or "").partition(".")[0] == OURS] += 1
        init(self, function, *args, **kwargs)

    step = begin(case, *sides)
    Parser.__init__ = counting
    seconds, parsed = seconds_of(step), [modules[True], modules[False]]
    first_peak, _ = peak_memory(), seconds_of(step, 10)
    return {"seconds": seconds, "parsed": parsed, "first_peak": first_peak, "peak": peak_memory()}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
