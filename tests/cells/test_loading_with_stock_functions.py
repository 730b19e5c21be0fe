"""What MindSpore's own functions load into a cell that has made steps is what the cell goes on from, bit for bit."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from support.manual_training import train_step_of
from support.networks import FEATURES, Linear, batch
from support.training import cell_of, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


def load_param_into_net(cell, values):
    mindspore.load_param_into_net(cell, {name: Parameter(Tensor(value), name=name) for name, value in values.items()})


def set_data(cell, values):
    for name, parameter in cell.parameters_dict().items():
        parameter.set_data(Tensor(values[name]))


def assign_value(cell, values):
    for name, parameter in cell.parameters_dict().items():
        parameter.assign_value(Tensor(values[name]))


OPTIMIZERS = {
    "momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9),
    "adam with schedule": lambda parameters: nn.Adam(parameters, nn.exponential_decay_lr(0.1, 0.5, 100, 1, 1)),
    "experimental adamw": lambda parameters: mindspore.experimental.optim.AdamW(parameters, 0.01),
}


@quick_in_graph_mode
@pytest.mark.parametrize(
    ("load", "optimizer", "steps"),
    [
        *slow((load_param_into_net, "momentum", 1), (assign_value, "momentum", 1)),
        (set_data, "adam with schedule", 1),
        (load_param_into_net, "experimental adamw", 2),
    ],
)
def test_training_goes_on_from_what_was_loaded(mode, load, optimizer, steps):
    network = nn.SequentialCell(nn.Dense(FEATURES, 4), nn.BatchNorm1d(4), nn.Dense(4, 1))
    optimizer, scale = OPTIMIZERS[optimizer](network.trainable_params()), DynamicLossScale(2.0**10, scale_window=2)
    keywords = {"ema_decay": 0.9, "clip_norm": 1.0, "gradient_accumulation_steps": steps}
    cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, scale, **keywords).set_train()

    def train(first, last):
        for seed in range(first, last):
            cell(*batch(seed))
        return state(cell)

    saved, expected = train(0, 3), train(3, 6)
    for _ in range(2):
        cell(*batch(6))
        load(cell, saved)
        assert changed(expected, train(3, 6)) == set()


class Online(nn.Cell):
    """A network whose gradient is its input, and its target, which a soft update moves."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([8.0, 8.0]), name="weight")
        self.target = Parameter(Tensor([0.0, 0.0]), name="target", requires_grad=False)

    def construct(self, x, y):
        return (self.weight * x + self.target * y).sum()

    def move_target(self):
        ops.assign(self.target, 0.5 * self.target + 0.5 * self.weight)


@pytest.mark.parametrize("kind", ["scaled", *slow("manual")])
def test_a_target_that_got_the_memory_of_its_network_gets_its_own(mode, kind):
    network = Online()
    network.target.set_data(network.weight)
    inputs = Tensor(1.0), Tensor(0.0)
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    cell = cell_of(kind, [network], [optimizer], DynamicLossScale(16.0), after_update=network.move_target)
    call = train_step_of(cell, [network]) if kind == "manual" else cell
    with pytest.warns(UserWarning, match="target shared memory with other Parameters"):
        call(*inputs)
    call(*inputs)
    assert network.weight.asnumpy().tolist() == [6.0, 6.0]
    assert network.target.asnumpy().tolist() == [6.75, 6.75]


@quick_in_pynative_mode
def test_a_learning_rate_that_was_set(mode):
    cells = []
    for _ in range(2):
        network = Linear()
        cells.append(ScaledTrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), 2.0**10))
    for cell in cells:
        cell(*batch(0))
    stock, in_place = cells
    stock.optimizer.learning_rate.set_data(Tensor(0.01, mindspore.float32))
    ops.assign(in_place.optimizer.learning_rate, Tensor(0.01, mindspore.float32))
    for cell in cells:
        cell(*batch(1))
    assert changed(state(stock), state(in_place)) == set()
    assert np.float32(stock.optimizer.learning_rate.asnumpy()) == np.float32(0.01)
