"""Callbacks that move the learning rate, in `Model(cell)`."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Model, Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.train import Callback, LearningRateScheduler, ReduceLROnPlateau

from ms_lossscale import (
    DynamicLossScale,
    ExposeOptimizer,
    ScaledTrainOneStepCell,
    ShardedOptimizer,
    SimultaneousTrainOneStepCell,
)

CALLS = 4


def train(model, *callbacks):
    x = np.random.default_rng(0).normal(size=(2 * CALLS, 4)).astype(np.float32)
    batches = NumpySlicesDataset((x, x.sum(1, keepdims=True)), shuffle=False).batch(2)
    model.train(3, batches, callbacks=list(callbacks), dataset_sink_mode=False)


def momentum(parameters):
    return nn.Momentum(parameters, 0.5, 0.9)


def experimental(parameters):
    return optim.SGD(parameters, 0.1)


def make(make_optimizer=momentum):
    net = nn.Dense(4, 1)
    optimizer = make_optimizer(net.trainable_params())
    return net, optimizer, ScaledTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, DynamicLossScale())


def make_two(*learning_rates):
    nets = [nn.Dense(4, 1), nn.Dense(4, 1)]
    nets[1].update_parameters_name("other.")
    optimizers = [nn.Momentum(net.trainable_params(), rate, 0.9) for net, rate in zip(nets, learning_rates)]
    losses = [nn.WithLossCell(net, nn.MSELoss()) for net in nets]
    return optimizers, SimultaneousTrainOneStepCell(losses, optimizers, DynamicLossScale())


def rate_of(optimizer):
    return optimizer.learning_rate.asnumpy().item()


class Weights(Callback):
    """Keeps the weights after each step."""

    def __init__(self, net):
        super().__init__()
        self.net, self.after = net, []

    def on_train_step_end(self, run_context):
        self.after.append(self.net.weight.asnumpy().copy())


def halving():
    """At every second step, so that weights tell when it was."""
    return LearningRateScheduler(lambda learning_rate, step: learning_rate / (1 if step % 2 else 2))


def plateau():
    return ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e6)


@quick_in_graph_mode
def test_they_do_what_they_do_without_a_training_cell(mode):
    rates, weights = [], []
    for is_ours in (False, True):
        mindspore.set_seed(0)
        net, optimizer, cell = make()
        model = Model(cell) if is_ours else Model(net, nn.MSELoss(), optimizer)
        weights.append(Weights(net))
        train(model, *[ExposeOptimizer()] * is_ours, halving(), plateau(), weights[-1])
        rates.append(rate_of(optimizer))
    assert rates[0] == rates[1] < 0.5
    np.testing.assert_allclose(weights[1].after, weights[0].after, rtol=1e-6)


@quick_in_pynative_mode
def test_each_moves_that_of_its_own_of_several_optimizers_and_none_that_of_one_alone(mode):
    optimizers, cell = make_two(0.5, 0.25)
    for callback in (halving(), plateau()):
        with pytest.raises(RuntimeError, match=r"2 optimizers.*ExposeOptimizer\(optimizer\) before it"):
            train(Model(cell), ExposeOptimizer(), callback)
    assert list(map(rate_of, optimizers)) == [0.5, 0.25]
    train(Model(cell), ExposeOptimizer(optimizers[1]), halving(), ExposeOptimizer(optimizers[0]), plateau())
    # To a plateau, the first epoch is the best so far. To print a rate, as a scheduler does, rounds it.
    expected = [0.5 / 2**2, 0.25 / 2 ** (3 * CALLS / 2)]
    assert list(map(rate_of, optimizers)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "make_model, make_optimizer, error, message",
    [
        (lambda: Model(make()[0], nn.MSELoss()), None, TypeError, "a 'Dense', which has no optimizer"),
        (lambda: Model(make()[2]), lambda: make()[1], ValueError, "one of the training cell's, but got another Moment"),
        (lambda: Model(make(experimental)[2]), None, TypeError, "the SGD keeps its learning rates in 'param_groups'"),
        (
            lambda: Model(make(lambda weights: ShardedOptimizer(weights, experimental))[2]),
            *(None, TypeError, "the SGD keeps its learning rates in 'param_groups'"),
        ),
    ],
    ids=["no optimizer", "another optimizer", "experimental", "experimental in a sharded one"],
)
def test_what_it_needs(make_model, make_optimizer, error, message):
    callback = ExposeOptimizer(make_optimizer and make_optimizer())
    with pytest.raises(error, match=f"For 'ExposeOptimizer'.*{message}"):
        train(make_model(), callback)


@quick_in_pynative_mode
def test_callbacks_that_ask_the_cell_for_its_optimizer(mode):
    """As those of toolkits do, which know one optimizer only."""
    _, cell = make_two([0.5, 0.25, 0.125], [0.1, 0.1, 0.1])
    inputs = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
    for step in range(2):
        assert cell.optimizer.global_step.asnumpy().item() == step
        cell(*inputs)
    optimizer = cell.optimizer
    assert optimizer.dynamic_lr and not optimizer.is_group_lr
    assert optimizer.learning_rate(optimizer.global_step).asnumpy().item() == 0.125
