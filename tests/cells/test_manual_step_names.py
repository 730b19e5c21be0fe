"""`ManualStep(..., name=...)`: names of its own for all that it holds, so that one compiled function may have two."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import ops
from support import gan_networks as gans
from support.manual_training import Halve, adam, batch, dynamic, manual, regression
from support.training import changed, state

from ms_lossscale import LossScaleMonitor, ManualStep, NormSpike

NAMES = ("maker", "critic")
CYCLE = {"gradient_accumulation_steps": 2, "ema_decay": 0.9}


def without(name, step):
    return {each.replace(f"{name}.", ""): value for each, value in state(step).items()}


def every_setting():
    return {
        **{"clip_norm": 1.0, "gradient_transforms": [Halve()], "skip_conditions": [NormSpike(z_score=9.0)]},
        **CYCLE,
    }


@quick_in_pynative_mode
@pytest.mark.parametrize("count", [1, 2])
def test_all_but_the_networks_own_gets_the_name(mode, count):
    def scales():
        return [dynamic() for _ in range(count)] if count > 1 else dynamic()

    named, networks, train_step = manual(scales(), count=count, name="critic", **every_setting())
    nameless, _, its_train_step = manual(scales(), count=count, **every_setting())
    own = {parameter.name for network in networks for parameter in network.get_parameters()}
    names = set(named.parameters_dict())
    assert {name for name in names if not name.startswith("critic.")} == own
    wanted = {"critic.ema.network_0.0.weight", "critic.calls", "critic.norm_spike.mean", "critic.accumulation.steps"}
    of_scale = "critic.loss_scale.scale_value" if count == 1 else "critic.network_1.loss_scale.scale_value"
    assert wanted | {of_scale} < names
    for seed in range(4):
        train_step(*batch(seed))
        its_train_step(*batch(seed))
    assert not changed(without("critic", named), state(nameless))
    weights = [weight.name for network in networks for weight in network.trainable_params()]
    assert list(named.ema_parameters()) == weights
    mindspore.save_checkpoint(named, "named.ckpt")
    loaded = mindspore.load_checkpoint("named.ckpt")
    fresh, _, _ = manual(scales(), count=count, name="critic", **every_setting())
    assert fresh.load_state_dict(loaded) == ([], [])
    assert not changed(state(fresh), state(named))
    with pytest.raises(RuntimeError, match=r"critic\.\S+.* are missing and .*\S+ and \d+ more are unexpected"):
        named.load_state_dict(nameless.parameters_dict())


@quick_in_pynative_mode
def test_a_loss_scale_that_two_steps_share_gets_the_name_of_the_first(mode):
    scale, steps = dynamic(), []
    for name in ("critic", "generator"):
        network = regression(prefix=f"{name}s_weights.")
        steps.append(ManualStep(network, adam(network), scale, name=name))
    assert scale.scale_value.name == "critic.loss_scale.scale_value"
    for step in steps:
        assert "critic.loss_scale.clean_steps" in step.parameters_dict()


class Gan:
    """A GAN whose two networks each have a ManualStep that restores both of them, and the forwards of the two."""

    def __init__(self, named, keywords):
        networks = gans.generator_and_discriminator()
        self.losses = gans.two_losses(*networks)
        self.steps = [
            ManualStep(list(networks), adam(network), dynamic(), name=name if named else None, **keywords()).set_train()
            for name, network in zip(NAMES, networks)
        ]

    def functions(self):
        g_step, d_step = self.steps
        g_value_and_grad, d_value_and_grad = (step.value_and_grad(loss) for step, loss in zip(self.steps, self.losses))

        def train_discriminator(real, noise, factor):
            real, noise = d_step.begin(real, noise)
            loss, grads = d_value_and_grad(real, noise, factor)
            return loss, d_step.end(grads, loss=loss)

        def train_generator(noise, factor):
            loss, grads = g_value_and_grad(g_step.begin(noise), factor)
            return loss, g_step.end(grads, loss=loss)

        return train_discriminator, train_generator


@pytest.mark.parametrize("keywords", [dict, *slow(every_setting)])
def test_a_gan_of_two_steps_in_one_compiled_function(mode, keywords):
    """Bit for bit what two compiled functions do."""
    gan, apart = Gan(True, keywords), Gan(False, keywords)
    first, second = gan.functions()

    @mindspore.jit
    def train_step(real, noise, d_factor, g_factor):
        d_results = first(real, noise, d_factor)
        return (*d_results, *second(ops.depend(noise, d_results[1]), g_factor))

    train_discriminator, train_generator = map(mindspore.jit, apart.functions())
    overflows = []
    for i, overflow_in in enumerate([(), (), (1,), (0,), (), (0, 1), (), (0,)]):
        real, noise, g_factor, d_factor = gans.gan_batch(i, overflow_in)
        results = train_step(real, noise, d_factor, g_factor)
        expected = (*train_discriminator(real, noise, d_factor), *train_generator(noise, g_factor))
        np.testing.assert_array_equal([its.asnumpy() for its in results], [its.asnumpy() for its in expected])
        overflows.append([bool(results[1]), bool(results[3])])
        for name, step, its_step in zip(NAMES, gan.steps, apart.steps):
            assert not changed(without(name, step), state(its_step))
    assert [False, True] in overflows and [True, False] in overflows and [False, False] in overflows
    assert all(step.counters()["skipped_steps"] >= 2 for step in gan.steps)


@quick_in_pynative_mode
def test_a_name_tells_the_lines_of_two_monitors_apart(mode, capsys):
    for name in (None, "critic"):
        step, _, train_step = manual(dynamic(), name=name)
        monitor = LossScaleMonitor(every_n_steps=1)
        with monitor.watching(step):
            (loss,), overflow = train_step(*batch(0))
            monitor.after_step(loss, overflow)
    nameless, named = (
        line for line in capsys.readouterr().out.splitlines() if "1 applied" in line and "loss scale" in line
    )
    assert named == nameless.replace("step 1: ", "step 1: critic: ")
