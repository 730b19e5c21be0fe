"""In PyNative mode, parts of a step are compiled: in the first calls, and never again while shapes stay."""

import sys

import numpy as np
import pytest
from conftest import MODES, slow
from mindspore import Tensor, nn
from support.gan_networks import (
    NETWORK_INPUTS,
    DiscriminatorLoss,
    GanLosses,
    GeneratorLoss,
    generator_and_discriminator,
)
from support.in_mode import in_mode
from support.networks import BATCH, FEATURES, Normalised, batch, overflowing_batch

import ms_lossscale as ls

# Compiling a step makes some 50,000 calls of Python functions, running it some hundred.
MOST_CALLS = 5000


def optimizer(network):
    return nn.Momentum(network.trainable_params(), 0.01, 0.9)


def scaled(**keywords):
    network = Normalised()
    return ls.ScaledTrainOneStepCell(network, optimizer(network), ls.DynamicLossScale(2.0**10), **keywords).set_train()


def manual(**keywords):
    network = Normalised().set_train()
    step = ls.ManualStep(network, optimizer(network), ls.DynamicLossScale(2.0**10), **keywords)
    value_and_grad = step.value_and_grad(lambda x, y: network(x, y))

    def call(x, y):
        x, y = step.begin(x, y)
        loss, grads = value_and_grad(x, y)
        return step.end(grads, loss=loss)

    return call


def gan(cell_class, networks=None, **keywords):
    generator, discriminator = generator_and_discriminator()
    if networks is None:
        networks = [GeneratorLoss(generator, discriminator), DiscriminatorLoss(generator, discriminator)]
        keywords["network_inputs"] = NETWORK_INPUTS
    else:
        networks = networks(generator, discriminator)
    optimizers = [optimizer(generator), optimizer(discriminator)]
    return cell_class(networks, optimizers, ls.DynamicLossScale(2.0**10), **keywords)


def of_gan(overflows):
    rng = np.random.default_rng(0)
    real = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    noise = rng.normal(size=(BATCH, 2)).astype(np.float32)
    factor = np.float32(np.inf if overflows else 1)
    return tuple(map(Tensor, (real, noise, np.float32(1), factor)))


def of_network(overflows):
    return overflowing_batch() if overflows else batch()


CYCLE = {"gradient_accumulation_steps": 2}
KEYWORDS = {"clip_norm": 1.0, "ema_decay": 0.9}
STEPS = {
    "plain": (scaled, of_network, {}),
    "retried": (scaled, of_network, {"max_retries": 2, **KEYWORDS}),
    "cycle": (scaled, of_network, CYCLE),
    "dropping": (scaled, of_network, {"drop_overflowed_calls": True, "max_retries": 1, **CYCLE}),
    "manual": (manual, of_network, KEYWORDS),
    "manual cycle": (manual, of_network, {"drop_overflowed_calls": True, **CYCLE}),
    "simultaneous": (lambda **of: gan(ls.SimultaneousTrainOneStepCell, **of), of_gan, {"max_retries": 1}),
    "shared": (lambda **of: gan(ls.SimultaneousTrainOneStepCell, GanLosses, **of), of_gan, {"max_retries": 1}),
    "alternating": (lambda **of: gan(ls.AlternatingTrainOneStepCell, **of), of_gan, {"every": (1, 2), **CYCLE}),
}
QUICK = ("retried", "shared")


def python_calls(call, inputs):
    """Returns how many Python functions a call runs."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        call(*inputs)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in STEPS if name not in QUICK))])
def test_a_step_compiles_nothing_once_it_has_run(name):
    """Neither while it applies nor while it skips, after both have happened."""
    make, inputs_of, keywords = STEPS[name]
    with in_mode(MODES["pynative"]):
        call = make(**keywords)
        first = python_calls(call, inputs_of(False))
        for overflows in (False, True, True, False, False, False):
            call(*inputs_of(overflows))
        calls = [python_calls(call, inputs_of(overflows)) for overflows in (False, False, True, True, False, False)]
    assert max(calls) < MOST_CALLS < first
