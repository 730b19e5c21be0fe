"""The sides that are compared in each case: functions that make one step and return a tensor to wait for."""

import numpy as np
from mindspore import GRAPH_MODE, Parameter, ParameterTuple, Tensor, amp, get_context, jit, nn, ops
from mindspore import dtype as mstype
from networks import ONE_NETWORK, dcgan, gan

from ms_lossscale import (
    DynamicLossScale,
    ManualStep,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    all_finite,
)


def _optimizer(network):
    return nn.Momentum(network.trainable_params(), learning_rate=1e-4, momentum=0.9)


def _in_graph_mode(function):
    return jit(function) if get_context("mode") == GRAPH_MODE else function


def stock(network, inputs):
    """MindSpore's cell, which scales nothing and checks nothing."""
    cell = nn.TrainOneStepCell(network, _optimizer(network)).set_train()
    return lambda: cell(*inputs)


def scaled(network, inputs, **keywords):
    """This package's cell with dynamic scale, check and transaction."""
    cell = ScaledTrainOneStepCell(network, _optimizer(network), DynamicLossScale(), **keywords).set_train()
    return lambda: cell(*inputs)[0]


def unscaled(network, inputs):
    """This package's cell without a loss scale or check."""
    cell = ScaledTrainOneStepCell(network, _optimizer(network), None).set_train()
    return lambda: cell(*inputs)[0]


def recipe(network, inputs, compiled=_in_graph_mode):
    """The hand-written step of MindSpore's tutorial on mixed precision."""
    optimizer = _optimizer(network)
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


def functional(network, inputs, compiled=_in_graph_mode):
    """A step written with functions, as the recipe is, around this package's ManualStep."""
    network.set_train()
    manual_step = ManualStep(network, _optimizer(network), DynamicLossScale())
    value_and_grad = manual_step.value_and_grad(network)

    def step(*inputs):
        loss, grads = value_and_grad(*manual_step.begin(*inputs))
        return ops.depend(loss, manual_step.end(grads))

    step = compiled(step)
    return lambda: step(*inputs)


_total = ops.MultitypeFuncGraph("total")
_times = ops.MultitypeFuncGraph("times")


@_total.register("Tensor")
def _total_of_tensor(tensor):
    if tensor.ndim > 2:
        tensor = tensor.reshape((tensor.shape[0], -1))
    if tensor.ndim > 1:
        tensor = ops.ReduceSum()(tensor, (-1,))
    return ops.ReduceSum()(tensor, ())


@_times.register("Tensor", "Tensor")
def _times_tensor(factor, tensor):
    return tensor * factor


class _ByHand(nn.TrainOneStepCell):
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
        grads = self.map(ops.partial(_times, 1.0 / scale), grads)
        totals = self.map(_total, grads)
        if self.state:
            totals += self.map(_total, self.state)
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
    cell = _ByHand(network, _optimizer(network)).set_train()
    return lambda: cell(*inputs)


def check_and_unscale(network, _):
    """Only the check and the unscaling, of gradients that exist already."""
    weights = network.trainable_params()
    grads = ParameterTuple(Parameter(weight.value(), name=f"gradient.{weight.name}") for weight in weights)
    for_each = ops.HyperMap()

    def step(scale):
        unscaled = for_each(ops.partial(_times, 1.0 / scale), grads)
        return ops.depend(all_finite(unscaled), unscaled)

    step = _in_graph_mode(step)
    scale = Tensor(2.0**16, mstype.float32)
    return lambda: step(scale)


def forward_and_backward(network, inputs):
    """Only forward and backward."""
    network.set_train()
    value_and_grad = ops.value_and_grad(network, None, ParameterTuple(network.trainable_params()))

    def step(*inputs):
        loss, grads = value_and_grad(*inputs)
        return ops.depend(loss, grads)

    step = _in_graph_mode(step)
    return lambda: step(*inputs)


def micro_step(network, inputs):
    """A call that only adds gradients to its accumulation cycle, which never ends here."""
    return scaled(network, inputs, gradient_accumulation_steps=10**6)


def two_stock_cells():
    """A GAN without this package: the discriminator's step and the generator's."""
    generator, discriminator, (images, noise) = dcgan()
    discriminate = nn.TrainOneStepCell(
        gan.network.DiscriminatorLoss(generator, discriminator), _optimizer(discriminator)
    )
    generate = nn.TrainOneStepCell(gan.network.GeneratorLoss(generator, discriminator), _optimizer(generator))
    discriminate.set_train()
    generate.set_train()

    def step():
        discriminate(images, noise)
        return generate(noise)

    return step


def two_recipes():
    """The same two steps, each by the hand-written recipe."""
    generator, discriminator, (images, noise) = dcgan()
    discriminate = _own_weights(gan.network.DiscriminatorLoss(generator, discriminator), discriminator)
    generate = _own_weights(gan.network.GeneratorLoss(generator, discriminator), generator)
    step_of_discriminator, step_of_generator = recipe(discriminate, (images, noise)), recipe(generate, (noise,))

    def step():
        step_of_discriminator()
        return step_of_generator()

    return step


def _own_weights(loss, network):
    loss.trainable_params = network.trainable_params
    return loss


def simultaneous(**keywords):
    """Both networks in one cell, with one check, one update, and one forward of the generator."""
    generator, discriminator, inputs = dcgan()
    cell = SimultaneousTrainOneStepCell(
        gan.network.BothLosses(generator, discriminator),
        [_optimizer(discriminator), _optimizer(generator)],
        DynamicLossScale(),
        **keywords,
    ).set_train()
    return lambda: cell(*inputs)[0]


# Each tensor is an argument of its own: a tuple would be a constant, and the result computed when compiling.


def _stock_check(*tensors):
    return amp.all_finite(tensors)


def _check(*tensors):
    return all_finite(tensors)


def _on_six_tensors(function):
    tensors = tuple(Tensor(np.random.default_rng(i).standard_normal((1024, 1024)).astype(np.float32)) for i in range(6))
    function = _in_graph_mode(function)
    return lambda: function(*tensors)


def _of(side, name, **keywords):
    return lambda: side(*ONE_NETWORK[name](), **keywords)


# In PyNative mode, this would run operator by operator, unlike the cell.
ONLY_IN_GRAPH_MODE = "check and unscale"

BY_HAND = "by hand"


# For each case, the side that the others are compared to comes first.
CASES = {
    name: {
        "stock": _of(stock, name),
        "ms_lossscale": _of(scaled, name),
        BY_HAND: _of(by_hand, name),
        "recipe": _of(recipe, name),
        ONLY_IN_GRAPH_MODE: _of(check_and_unscale, name),
    }
    for name in ONE_NETWORK
}
CASES["unscaled"] = {"stock": _of(stock, "tiny"), "ms_lossscale": _of(unscaled, "tiny")}
CASES["dcgan"] = {"stock": two_stock_cells, "ms_lossscale": simultaneous, "recipe": two_recipes}
CASES["accumulation"] = {
    "forward and backward": _of(forward_and_backward, "mlp"),
    "ms_lossscale": _of(micro_step, "mlp"),
}
CASES["check"] = {
    "amp.all_finite": lambda: _on_six_tensors(_stock_check),
    "ms_lossscale": lambda: _on_six_tensors(_check),
}
# Steps written with functions; the second one compiles them in PyNative mode, too.
CASES["functional"] = {"amp.DynamicLossScaler": _of(recipe, "mlp"), "ms_lossscale": _of(functional, "mlp")}
CASES["functional_jit"] = {
    "amp.DynamicLossScaler": _of(recipe, "mlp", compiled=jit),
    "ms_lossscale": _of(functional, "mlp", compiled=jit),
}
# The cost of allowing retries where there are none: in float32, nothing overflows here.
for name in ("lenet", "mlp", "resnet18"):
    CASES[f"{name}_retries"] = {
        "max_retries=0": _of(scaled, name),
        "ms_lossscale": _of(scaled, name, max_retries=3),
    }
CASES["dcgan_retries"] = {"max_retries=0": simultaneous, "ms_lossscale": lambda: simultaneous(max_retries=3)}


def sides_of(case, mode="graph", all_of_them=False):
    """Returns the sides of a case, all or the most important ones."""
    sides = CASES[case].items()
    sides = [side for i, side in enumerate(sides) if all_of_them or i < 2 or side[0] == BY_HAND]
    return {name: side for name, side in sides if mode == "graph" or name != ONLY_IN_GRAPH_MODE}
