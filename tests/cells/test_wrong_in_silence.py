"""What once went wrong without a word: each with its right value, or its error."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from support.training import by_sgd

import ms_lossscale as ls

INF = float("inf")


class Slope(nn.Cell):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([0.0, 0.0]), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


def x(*values):
    return Tensor(np.array(values, np.float32))


@quick_in_pynative_mode
def test_two_steps_that_share_a_scale_leave_each_others_back_off(mode):
    scale = ls.DynamicLossScale(2.0**16)
    networks = [Slope(), Slope()]
    networks[1].weight.name = "other"
    steps = [by_sgd(network, scale, 1.0, "manual") for network in networks]
    derivatives = [step.value_and_grad(network) for step, network in zip(steps, networks)]
    for step in steps:
        step.begin(x(1, 2))
    for step, derivative, data in zip(steps, derivatives, (x(1, INF), x(1, 2))):
        assert bool(step.end(derivative(data)[1])) == (step is steps[0])
    assert scale.get_loss_scale() == 2.0**15
    np.testing.assert_array_equal(networks[1].weight.asnumpy(), [-1, -2])


@quick_in_pynative_mode
def test_a_scale_that_is_set_within_a_step_before_its_forward_is_the_next_ones(mode):
    network = Slope()
    step = by_sgd(network, ls.DynamicLossScale(2.0**10), 1.0, "manual")
    value_and_grad = step.value_and_grad(network)
    data = step.begin(x(1, 2))
    step.set_loss_scale(64.0)
    step.end(value_and_grad(data)[1])
    np.testing.assert_array_equal(network.weight.asnumpy(), [-1, -2])
    assert step.get_loss_scale() == 64.0


@pytest.mark.parametrize(
    "mode, stock",
    [("graph", True), ("pynative", False), *slow(("graph", False), ("pynative", True))],
    indirect=["mode"],
)
def test_averages_that_a_checkpoint_lacks_begin_with_its_weights(mode, stock):
    def make(**keywords):
        network = Slope()
        network.weight.set_data(x(100, 100))
        return network, by_sgd(network, ls.DynamicLossScale(2.0**4), 1.0, **keywords)

    network, cell = make()
    network.weight.set_data(x(5, 5))
    cell(x(0, 0))
    mindspore.save_checkpoint(cell, "without.ckpt")
    loaded, (_, averaged) = mindspore.load_checkpoint("without.ckpt"), make(ema_decay=0.9)
    if stock:
        mindspore.load_param_into_net(averaged, loaded)
    else:
        averaged.load_state_dict(loaded, strict=False)
    for _ in range(3):
        averaged(x(0, 0))
    np.testing.assert_array_equal(averaged.ema_parameters()["weight"].asnumpy(), [5, 5])


@quick_in_graph_mode
def test_a_weight_that_was_cast_there_and_back_goes_on_training(mode):
    network = Slope()
    cell = by_sgd(network, ls.DynamicLossScale(2.0**4), 1.0)
    cell(x(1, 2))
    network.weight.set_dtype(mstype.float16)
    network.weight.set_dtype(mstype.float32)
    cell(x(1, 2))
    cell(x(1, 2))
    np.testing.assert_array_equal(network.weight.asnumpy(), [-3, -6])


@quick_in_graph_mode
def test_a_group_that_is_added_to_a_running_optimizer(mode):
    network, other = Slope(), Parameter(Tensor(np.zeros(2, np.float32)), name="other")
    optimizer = mindspore.experimental.optim.SGD(network.trainable_params(), lr=0.1)
    cell = ls.ScaledTrainOneStepCell(network, optimizer, ls.DynamicLossScale(2.0**4)).set_train()
    cell(x(1, 2))
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(RuntimeError, match=r"has 2 parameters, but had 1.*Construct a new cell"):
        cell(x(1, 2))


@quick_in_pynative_mode
def test_a_loss_that_the_steps_own_scale_scaled_is_not_warned_of(mode):
    network, scale = Slope(), ls.DynamicLossScale(2.0**4)
    step = by_sgd(network, scale, 1.0, "manual")

    def forward(data):
        return scale.scale(network(data))

    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.end(value_and_grad(step.begin(x(1, 2)))[1])
    np.testing.assert_array_equal(network.weight.asnumpy(), [-1, -2])
