"""Every optimizer that MindSpore has trains with a loss scale exactly as it does without one.

The oracle is MindSpore's unscaled training cell. An optimizer that does not run there (no kernel on this device, say)
is skipped, and the reason is what MindSpore said."""

import numpy as np
import pytest
from conftest import nightly
from mindspore import nn
from support.networks import LinearWithBias, batch, batch_for
from support.optimizers import OPTIMIZERS, RUN_EVERYWHERE, make_optimizer
from support.training import restore, state, weights

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

pytestmark = pytest.mark.slow

NOT_COMPARABLE = {
    "nn.thor": "takes a network of layers of its own only (nn.DenseThor and so on), with kernels for GPU and Ascend"
}

# Two clean steps, after which the scale doubles; one that is skipped; two more, after which it doubles again.
OVERFLOWS = (False, False, True, False, False)


def train_unscaled(name):
    """The weights that MindSpore's unscaled cell arrives at in the clean steps. A TypeError is not caught: it would be
    a wrong argument, given by this test."""
    network = LinearWithBias()
    try:
        optimizer, schedule = make_optimizer(name, network)
        stock_cell = nn.TrainOneStepCell(network, optimizer).set_train()
        for step, overflow in enumerate(OVERFLOWS):
            if not overflow:
                stock_cell(*batch(seed=step))
                if schedule:
                    schedule.step()
        if any(map(np.array_equal, weights(network), weights(LinearWithBias()))):
            # MindSpore 2.10's in-place operators, of which mint's optimizers are made, do nothing in PyNative on CPU.
            raise RuntimeError("The weights do not move.")
    except (RuntimeError, ValueError) as error:
        # Its first line that is no heading.
        said = next((line for line in str(error).splitlines() if line and not line.startswith("-")), repr(error))
        assert name not in RUN_EVERYWHERE, f"{name} does not run unscaled: {said}"
        pytest.skip(f"{name} does not run in MindSpore's unscaled cell here: {said}")
    return weights(network)


def train_scaled(cell, schedule, start, init_loss_scale):
    """The weights that our cell arrives at from all that it held at the start."""
    restore(cell, start)
    cell.set_loss_scale(init_loss_scale)
    scales = []
    for step, overflow in enumerate(OVERFLOWS):
        _, overflowed, loss_scale = cell(*batch_for(overflow, seed=step))
        assert bool(overflowed) == overflow
        scales.append(float(loss_scale) / init_loss_scale)
        if schedule and not overflow:
            schedule.step()
    assert scales == [1.0, 1.0, 2.0, 1.0, 1.0]
    return weights(cell.network)


# Each in one of the modes, and before a release in both. Some of the others run in graph mode only.
IN_GRAPH_MODE = [name for i, name in enumerate(OPTIMIZERS) if i % 2 or name not in RUN_EVERYWHERE]
MODES = [(name, ("graph", "pynative")[:: 1 if name in IN_GRAPH_MODE else -1]) for name in OPTIMIZERS]
EACH = [(name, first) for name, (first, _) in MODES] + nightly(*((name, second) for name, (_, second) in MODES))


@pytest.mark.parametrize("name, mode", EACH, indirect=["mode"])
def test_trains_as_without_a_scale(mode, name):
    if name in NOT_COMPARABLE:
        pytest.skip(f"{name} {NOT_COMPARABLE[name]}")
    expected, network = train_unscaled(name), LinearWithBias()
    optimizer, schedule = make_optimizer(name, network)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10, scale_window=2)).set_train()
    made = cell, schedule, state(cell)
    for weight, wanted in zip(train_scaled(*made, 2.0**10), expected):
        # A power of two moves the exponent only: the gradients, and so all that follows, are the same bits.
        np.testing.assert_array_equal(weight, wanted)
    for weight, wanted in zip(train_scaled(*made, 1000.0), expected):
        # Each operation of the backward, and unscaling, rounds to 2**-24 = 6e-8. Some ten of them a step, four steps,
        # and weights of the order of 1: less than 1e-5. A missing division is off by 0.1 and more, except where an
        # optimizer normalises its gradients: of those, the configurations compare the moments.
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-5)
