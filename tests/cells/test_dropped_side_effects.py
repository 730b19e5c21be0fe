"""Graph mode may drop what nothing uses, such as the `_` of an assignment, and then warns that "some side effect nodes
were eliminated by mistake". No user should have to judge whether what was dropped matters. It warned of a check in
networks with two BatchNorms; of others, in some processes only. With FAIL_IF_DROPPED=1, `conftest.py` looks for it in
every test. MindSpore 2.7 also warned of a value of `assign` that was used."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import Tensor, nn
from support.gan_networks import renamed
from support.in_mode import in_mode
from support.training import stepping

import ms_lossscale as ls

ONES = Tensor(np.ones((2, 1, 4, 4), np.float32))


class Normed(nn.Cell):
    def __init__(self, returned="loss"):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2))
        self.returned = returned
        self.set_train()

    def construct(self, x):
        loss = self.layers(x).sum()
        if self.returned == "loss":
            return loss
        return loss, (2 if self.returned == "weighted" else loss * loss)


def momentum(weights):
    return nn.Momentum(weights, 0.1, 0.9)


def scaled(returned="loss", **keywords):
    network = Normed(returned)
    return ls.ScaledTrainOneStepCell(network, momentum(network.trainable_params()), ls.DynamicLossScale(), **keywords)


def several(cell_class):
    networks = [renamed(f"n{i}.", Normed()) for i in range(2)]
    return cell_class(networks, [momentum(each.trainable_params()) for each in networks], ls.DynamicLossScale())


def two_losses():
    network = renamed("n.", Normed("losses"))
    first, *others = network.trainable_params()
    return ls.SimultaneousTrainOneStepCell(network, [momentum([first]), momentum(others)], ls.DynamicLossScale())


def manual():
    network = Normed()
    step = ls.ManualStep(network, momentum(network.trainable_params()), ls.DynamicLossScale())
    return stepping(step, network, "in_jit")


CASES = {
    **{"scaled": scaled, "losses": two_losses, "manual": manual},
    "aux": lambda: scaled("aux", has_aux=True),
    "weighted": lambda: scaled("weighted", weighted=True),
    "accumulating": lambda: scaled(gradient_accumulation_steps=2),
    "condition": lambda: scaled(skip_conditions=[ls.NormSpike(max_norm=1e6)]),
    "retried": lambda: scaled(max_retries=1),
    "simultaneous": lambda: several(ls.SimultaneousTrainOneStepCell),
    "alternating": lambda: several(ls.AlternatingTrainOneStepCell),
    "profile_gradients": lambda: lambda x: ls.profile_gradients(scaled(), [(x,)]),
    "find_loss_scale": lambda: scaled().find_loss_scale,
}
QUICK = ("scaled", "losses", "profile_gradients")


@pytest.mark.parametrize("case", [*QUICK, *slow(*sorted({*CASES} - {*QUICK}))])
def test_graph_mode_drops_nothing_of_a_step(case, capfd):
    with in_mode(mindspore.GRAPH_MODE):
        CASES[case]()(ONES)
    assert "WARNING" not in capfd.readouterr().err
