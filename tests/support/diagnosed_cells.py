"""Training cells that are diagnosed, their batches, and the gradients that the diagnoses must count."""

import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

import ms_lossscale as ls
from support import gan_networks as gans
from support.networks import FEATURES, Linear, Mlp, Normalised, batch
from support.numpy_casts import counts_of, shares_of_cast

BATCHES = [batch(seed) for seed in range(3)]


class _Differentiated(nn.Cell):  # The loss times a scale, in float32, and its gradients by the weights.
    def __init__(self, loss, weights, loss_scale, item):
        super().__init__(auto_prefix=False)
        self.loss, self.scale, self.item = loss, loss_scale, item
        self.grad = ops.grad(self.scaled, None, ParameterTuple(weights))

    def scaled(self, *inputs):
        loss = self.loss(*inputs)
        return ((loss if self.item is None else loss[self.item]).astype(mstype.float32) * self.scale).sum()

    def construct(self, *inputs):
        return self.grad(*inputs)


def gradients_of(loss, weights, batches, loss_scale=1.0, item=None):
    """From each weight's name to its unscaled gradients over all batches, as the present mode computes them."""
    grads = {weight.name: [] for weight in weights}
    differentiated = _Differentiated(loss, weights, loss_scale, item)
    for inputs in batches:
        for weight, each in zip(weights, differentiated(*inputs)):
            grads[weight.name].append(each.asnumpy().astype(np.float32).ravel() / np.float32(loss_scale))
    return {name: np.concatenate(arrays) for name, arrays in grads.items()}


def assert_counts(report, grads):  # Whether a report counts exactly these gradients, and what casts make of them.
    assert {name: each.as_dict() for name, each in report.parameters.items()} == {
        name: counts_of(values) for name, values in grads.items()
    }
    together = np.concatenate(list(grads.values()))
    assert report.total.as_dict() == counts_of(together)
    for dtype in (mstype.float16, mstype.bfloat16):
        scales = [2.0**exponent for exponent in range(-126, 127)]
        assert report.shares(dtype) == {scale: shares_of_cast(together, scale, dtype) for scale in scales}


def scaled():
    network = Normalised().set_train()
    cell = ls.ScaledTrainOneStepCell(network, nn.Adam(network.trainable_params()), ls.DynamicLossScale(2.0**10))
    return cell, BATCHES, [(network, network.trainable_params(), BATCHES, None)]


def with_aux():
    network = Mlp()
    cell = ls.ScaledTrainOneStepCell(gans.WithAux(network), nn.Adam(network.trainable_params()), has_aux=True)
    return cell, BATCHES, [(network, network.trainable_params(), BATCHES, None)]


def gan(kind, loss_scale=2.0**10, **keywords):
    """A cell of this kind, its batches, and of each loss: what computes it, its weights, its batches and its item."""
    networks = gans.generator_and_discriminator()
    batches = [gans.gan_batch(seed) for seed in range(2)]
    own = [network.trainable_params() for network in networks]
    losses = gans.two_losses(*networks)
    if kind == "tuple":
        both = gans.GanLosses(*networks)
        cell = ls.SimultaneousTrainOneStepCell(both, gans.two_optimizers(*networks), loss_scale, **keywords)
        return cell, batches, [(both, own[i], batches, i) for i in range(2)]
    make = ls.SimultaneousTrainOneStepCell if kind == "simultaneous" else ls.AlternatingTrainOneStepCell
    its_losses = [gans.WithAux(loss) for loss in losses] if keywords.get("has_aux") else losses
    cell = make(its_losses, gans.two_optimizers(*networks), loss_scale, network_inputs=gans.NETWORK_INPUTS, **keywords)
    takes = [[gans.take(gans.NETWORK_INPUTS[i], inputs) for inputs in batches] for i in range(2)]
    return cell, batches, [(losses[i], own[i], takes[i], None) for i in range(2)]


CELLS = {
    "scaled": scaled,
    "with aux": with_aux,
    "simultaneous": lambda: gan("simultaneous"),
    "simultaneous with aux": lambda: gan("simultaneous", has_aux=True),
    "tuple": lambda: gan("tuple"),
    "alternating": lambda: gan("alternating", every=(1, 2)),
    "alternating, accumulating": lambda: gan("alternating", gradient_accumulation_steps=2),
}


class Failing(nn.Cell):  # Fails on a batch of `wrong_shape`.
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(FEATURES), Linear()

    def construct(self, x, y):
        return self.linear(self.norm(x), y)


def wrong_shape():
    return Tensor(np.ones((4, FEATURES + 1), np.float32)), BATCHES[0][1]
