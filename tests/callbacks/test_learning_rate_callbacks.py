"""Callbacks that move the learning rate, in `Model(cell)`."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode
from mindspore import Model, Parameter, Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.train import Callback, LearningRateScheduler, ReduceLROnPlateau

from ms_lossscale import DynamicLossScale, ExposeOptimizer, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

CALLS = 4


def dataset():
    x = np.random.default_rng(0).normal(size=(2 * CALLS, 4)).astype(np.float32)
    return NumpySlicesDataset((x, x.sum(1, keepdims=True)), shuffle=False).batch(2)


def momentum(parameters):
    return nn.Momentum(parameters, 0.5, 0.9)


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


class Weights(Callback):
    """Keeps the weights after each step."""

    def __init__(self, net):
        super().__init__()
        self.net, self.after = net, [net.weight.asnumpy().copy()]

    def on_train_step_end(self, run_context):
        self.after.append(self.net.weight.asnumpy().copy())


def halve(learning_rate, step):
    """At every second step, so that weights tell when it was."""
    return learning_rate / 2 if step % 2 == 0 else learning_rate


@quick_in_graph_mode
@pytest.mark.parametrize(
    "callback",
    [lambda: LearningRateScheduler(halve), lambda: ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e6)],
    ids=["scheduler", "plateau"],
)
def test_they_do_what_they_do_without_a_training_cell(mode, callback):
    nets, rates, weights = [], [], []
    for is_ours in (False, True):
        net, optimizer, cell = make()
        if is_ours:
            mindspore.load_param_into_net(net, {name: Parameter(value) for name, value in nets[0].items()})
            model, callbacks = Model(cell), [ExposeOptimizer(), callback()]
        else:
            nets.append({name: value.asnumpy().copy() for name, value in net.parameters_dict().items()})
            model, callbacks = Model(net, nn.MSELoss(), optimizer), [callback()]
        weights.append(Weights(net))
        model.train(3, dataset(), callbacks=[*callbacks, weights[-1]], dataset_sink_mode=False)
        rates.append(optimizer.learning_rate.asnumpy().item())
    assert rates[0] == rates[1] < 0.5
    np.testing.assert_allclose(weights[1].after, weights[0].after, rtol=1e-6)


@quick_in_graph_mode
def test_each_moves_that_of_its_own_of_several_optimizers(mode):
    optimizers, cell = make_two(0.5, 0.25)
    callbacks = [
        ExposeOptimizer(optimizers[1]),
        LearningRateScheduler(lambda learning_rate, step: learning_rate / 2),
        ExposeOptimizer(optimizers[0]),
        ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e6),
    ]
    Model(cell).train(3, dataset(), callbacks=callbacks, dataset_sink_mode=False)
    rates = [optimizer.learning_rate.asnumpy().item() for optimizer in optimizers]
    # To a plateau, the first epoch is the best so far. To print a rate, as a scheduler does, rounds it.
    assert rates == pytest.approx([0.5 / 2**2, 0.25 / 2 ** (3 * CALLS)], rel=1e-5)


@pytest.mark.parametrize(
    "make_model, make_optimizer, error, message",
    [
        (lambda: Model(make()[0], nn.MSELoss()), None, TypeError, "a 'Dense', which has no optimizer"),
        (lambda: Model(make()[2]), lambda: make()[1], ValueError, "one of the training cell's, but got another Moment"),
        (
            lambda: Model(make(lambda parameters: optim.SGD(parameters, 0.1))[2]),
            None,
            TypeError,
            "the SGD keeps its learning rates in 'param_groups'",
        ),
    ],
    ids=["no optimizer", "another optimizer", "experimental"],
)
def test_what_it_needs(make_model, make_optimizer, error, message):
    callback = ExposeOptimizer(make_optimizer and make_optimizer())
    with pytest.raises(error, match=f"For 'ExposeOptimizer'.*{message}"):
        make_model().train(1, dataset(), callbacks=[callback], dataset_sink_mode=False)


@pytest.mark.parametrize("wrong", [3, "SGD", nn.Adam, nn.Dense(2, 2), [momentum(nn.Dense(1, 1).trainable_params())]])
def test_only_an_optimizer_can_be_shown(wrong):
    with pytest.raises(TypeError, match="For 'ExposeOptimizer', the argument 'optimizer' must be an optimizer or None"):
        ExposeOptimizer(wrong)


@quick_in_graph_mode
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


@pytest.mark.parametrize(
    "callback",
    [
        LearningRateScheduler(lambda learning_rate, step: learning_rate / 2),
        ReduceLROnPlateau("loss", patience=1, min_delta=1e6),
    ],
    ids=["scheduler", "plateau"],
)
def test_they_do_not_move_that_of_one_network_alone(callback):
    optimizers, cell = make_two(0.5, 0.5)
    with pytest.raises(RuntimeError, match=r"2 optimizers.*ExposeOptimizer\(optimizer\) before it"):
        Model(cell).train(3, dataset(), callbacks=[ExposeOptimizer(), callback], dataset_sink_mode=False)
    assert [optimizer.learning_rate.asnumpy().item() for optimizer in optimizers] == [0.5, 0.5]


# MindSpore's fault.
