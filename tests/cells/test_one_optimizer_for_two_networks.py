"""An alternating cell that has one optimizer twice, for a loss and for a regulariser that is computed now and then."""

import warnings

import numpy as np
import pytest
from conftest import slow
from mindspore import Tensor, nn
from support.networks import BATCH, Around, Linear, batch_for
from support.refused import refused
from support.training import changed, state

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale

RATE, MOMENTUM, DECAY = 0.1, 0.5, 0.75


class Half(Around):
    def construct(self, *inputs):
        return 0.5 * self.network(*inputs)


class Trained:
    """The cell, and what it must do, computed with NumPy. `every` says in which calls each network takes part."""

    def __init__(self, every, ema_decay=DECAY, loss_scale=None):
        self.network = Linear()
        optimizer = nn.Momentum(self.network.trainable_params(), RATE, MOMENTUM)
        self.cell = AlternatingTrainOneStepCell(
            [self.network, Half(self.network)],
            [optimizer, optimizer],
            DynamicLossScale(2.0**4) if loss_scale is None else loss_scale,
            every=every,
            network_inputs=[(0, 1), (2, 3)],
            ema_decay=ema_decay,
        ).set_train()
        self.every = every
        self.decays = ema_decay if isinstance(ema_decay, list) else [ema_decay] * 2
        self.weight = self.network.weight.asnumpy().astype(np.float64)
        self.moment = np.zeros_like(self.weight)
        self.average = None
        self.calls = 0

    def call(self, overflows=(False, False)):
        self.calls += 1
        batches = [batch_for(overflow, 2 * self.calls + i) for i, overflow in enumerate(overflows)]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="For 'Alternating")
            self.cell(*batches[0], *batches[1])
        for i, factor in enumerate((1.0, 0.5)):
            if self.calls % self.every[i] == 0 and not overflows[i]:
                self._step(i, factor, *(each.asnumpy().astype(np.float64) for each in batches[i]))

    def _step(self, i, factor, x, y):
        before = self.weight
        gradient = factor * 2 / BATCH * x.T @ (x @ self.weight - y)
        self.moment = MOMENTUM * self.moment + gradient
        self.weight = self.weight - RATE * self.moment
        if self.decays[i] is not None:
            self.average = DECAY * (before if self.average is None else self.average) + (1 - DECAY) * self.weight

    def check(self):
        np.testing.assert_allclose(self.network.weight.asnumpy(), self.weight, rtol=1e-5)
        np.testing.assert_allclose(self.cell.ema_parameters()["weight"].asnumpy(), self.average, rtol=1e-5)


@pytest.mark.parametrize("every", [(1, 3), *slow(((2, 1),))])
def test_both_train_the_weights_and_one_average_follows_each_update(mode, every):
    its = Trained(every)
    its.call((every[0] == 1, every[1] == 1))
    # Between construction and the first applied step, weights may be loaded.
    its.network.weight.set_data(Tensor(np.full((3, 1), 2.0, np.float32)))
    its.weight = np.full((3, 1), 2.0)
    for call in range(5):
        its.call((call == 1, call == 3))
        its.check()
    resumed = Trained(every)
    resumed.cell.load_state_dict(its.cell.parameters_dict())
    for either in (its, resumed):
        either.calls = 6
        either.call()
    assert not changed(state(its.cell), state(resumed.cell))
    with its.cell.ema_weights():
        np.testing.assert_allclose(its.network.weight.asnumpy(), its.average, rtol=1e-5)
    its.check()


@pytest.mark.parametrize("loss_scale", [[None, None], *slow(([DynamicLossScale(), None],))])
def test_also_where_not_both_are_scaled(mode, loss_scale):
    its = Trained((1, 2), loss_scale=loss_scale)
    for _ in range(4):
        its.call()
        its.check()


@pytest.mark.parametrize("ema_decay", [[DECAY, None], *slow(([None, DECAY],))])
def test_an_average_of_one_network_follows_its_updates_alone(mode, ema_decay):
    its = Trained((1, 2), ema_decay)
    for call in range(4):
        its.call((call == 2, False))
        if call > 0:
            its.check()


def test_two_decays_are_refused():
    words = "one average of its weights", "'ema_decay' must be the same for them, or None, but got [0.75, 0.5]"
    refused(lambda: Trained((1, 2), [0.75, 0.5]), ValueError, *words)


def test_a_second_cell_gives_the_state_of_the_optimizer_no_other_names(mode):
    network = Linear()
    optimizer = nn.Momentum(network.trainable_params(), RATE, MOMENTUM)
    names = []
    for steps in (1, 2):
        AlternatingTrainOneStepCell(
            [network, Half(network)],
            [optimizer, optimizer],
            network_inputs=[(0, 1), (2, 3)],
            gradient_accumulation_steps=steps,
        )
        names.append([parameter.name for parameter in optimizer.get_parameters()])
    assert names[0] == names[1]
