"""
In a plain step the host reads no value of a tensor: on a GPU or NPU each read waits until all that is queued is done.
Neither do a LossScaleMonitor between its lines, and `begin`, `value_and_grad` and `end` of a ManualStep.
"""

import pytest
from conftest import in_pairs, slow
from mindspore import Tensor, nn
from support import gan_networks as gan
from support.host_reads import recorded
from support.normalised_training import Convolutional
from support.normalised_training import batch as images
from support.training import stepping

import ms_lossscale as ls

# Until then, some cells look at what the forward writes that is not restored; the next look comes at the 50th step.
FIRST, STEPS = 4, 20


def reads_in(step, monkeypatch):
    for _ in range(FIRST):
        step()
    with recorded(monkeypatch) as reads:
        for _ in range(STEPS):
            step()
    return reads


def test_what_reads_is_noted(monkeypatch):
    with recorded(monkeypatch) as reads:
        one = Tensor([1.0])
        float(one), bool(one), one.asnumpy(), one.item()
    assert len(reads) >= 4


ALL = {
    "clip_norm": 1.0,
    "ema_decay": 0.9,
    "gradient_accumulation_steps": 2,
    "drop_overflowed_calls": True,
    "skip_conditions": [ls.NormSpike(max_norm=9.0)],
}
SETTINGS = {"plain": {}, "all": ALL, "not scaled": {"loss_scale": None}}


@pytest.mark.parametrize("settings", ["plain", *slow("all", "not scaled")])
def test_a_step_and_a_monitor(mode, settings, monkeypatch):
    network = Convolutional()
    keywords = {"loss_scale": ls.DynamicLossScale(2.0**10), **SETTINGS[settings]}
    cell = ls.ScaledTrainOneStepCell(
        network, nn.Momentum(network.trainable_params(), 0.01, 0.9), **keywords
    ).set_train()
    monitor, inputs = ls.LossScaleMonitor(every_n_steps=100), images(0)
    with monitor.watching(cell):
        assert reads_in(lambda: monitor.after_step(*cell(*inputs)), monkeypatch) == []


@in_pairs
def test_a_manual_step(mode, how, monkeypatch):
    network = Convolutional().set_train()
    step = ls.ManualStep(network, nn.Momentum(network.trainable_params(), 0.01, 0.9), ls.DynamicLossScale(2.0**10))
    train_step = stepping(step, network, how)
    monitor, inputs = ls.LossScaleMonitor(every_n_steps=100), images(0)
    with monitor.watching(step):
        assert reads_in(lambda: monitor.after_step(*train_step(*inputs)), monkeypatch) == []


# In PyNative mode, the host asks before each network's step whether it takes part.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph"], indirect=True)
def test_alternating_networks(mode, monkeypatch):
    networks = gan.generator_and_discriminator()
    losses, optimizers, rule = gan.two_losses(*networks), gan.two_optimizers(*networks), ls.DynamicLossScale(2.0**10)
    cell = ls.AlternatingTrainOneStepCell(losses, optimizers, rule, network_inputs=gan.NETWORK_INPUTS)
    cell.set_train()
    monitor, inputs = ls.LossScaleMonitor(every_n_steps=100), gan.gan_batch(seed=0)
    with monitor.watching(cell):
        assert reads_in(lambda: monitor.after_step(*cell(*inputs)), monkeypatch) == []
