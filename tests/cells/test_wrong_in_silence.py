"""What once went wrong without a word: each with its right value, or its error."""

import copy
import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from support.training import changed, state

import ms_lossscale as ls

ONE = Tensor(1.0, mstype.float32)
INF = float("inf")


class Slope(nn.Cell):
    """Its gradient is its input."""

    def __init__(self, size=2):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros(size, np.float32)), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


def x(*values):
    return Tensor(np.array(values, np.float32))


def sgd(network):
    return nn.SGD(network.trainable_params(), 1.0)


def manual(network, loss_scale, **keywords):
    """A ManualStep on a network, and a function that makes a step of it."""
    step = ls.ManualStep(network, sgd(network), loss_scale, **keywords)
    value_and_grad = step.value_and_grad(network)

    def train_step(data, **of_end):
        data = step.begin(data)
        loss, grads = value_and_grad(data)
        return step.end(grads, **{name: loss if its is True else its for name, its in of_end.items()})

    return step, train_step


class Normed(nn.Cell):
    """Its statistics move before it may raise."""

    def __init__(self, raises=False):
        super().__init__()
        self.norm, self.dense, self.raises = nn.BatchNorm1d(2), nn.Dense(2, 1), raises

    def construct(self, data):
        output = self.dense(self.norm(data)).sum()
        if self.raises and not np.isfinite(output.asnumpy()):
            raise ValueError("matrix contains invalid numeric entries")
        return output


@quick_in_pynative_mode
def test_two_steps_that_share_a_scale_leave_each_others_back_off(mode):
    scale = ls.DynamicLossScale(2.0**16)
    networks = [Slope(), Slope()]
    networks[1].weight.name = "other"
    steps = [ls.ManualStep(network, sgd(network), scale) for network in networks]
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
    step = ls.ManualStep(network, sgd(network), ls.DynamicLossScale(2.0**10))
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
        return network, ls.ScaledTrainOneStepCell(
            network, sgd(network), ls.DynamicLossScale(2.0**4), **keywords
        ).set_train()

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
    cell = ls.ScaledTrainOneStepCell(network, sgd(network), ls.DynamicLossScale(2.0**4)).set_train()
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


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("keywords", [{}, {"gradient_accumulation_steps": 2}, {"max_retries": 2}])
def test_an_exception_in_a_forward_leaves_nothing(mode, keywords):
    network = Normed(raises=True).set_train()
    cell = ls.ScaledTrainOneStepCell(network, sgd(network), ls.DynamicLossScale(2.0**4), **keywords).set_train()
    good = Tensor(np.array([[1, 2], [3, 5]], np.float32))
    cell(good)
    before = state(cell)
    with pytest.raises(ValueError, match="invalid numeric entries"):
        cell(good * INF)
    assert changed(before, state(cell)) == set()
    cell(good)


@quick_in_pynative_mode
def test_calls_that_are_wrong_say_so(mode):
    network = Slope()
    step, train_step = manual(network, ls.DynamicLossScale(2.0**4), skip_conditions=[ls.NormSpike(max_norm=1e6)])
    calls = {
        r"unexpected keyword argument 'weights'": lambda: train_step(x(1, 2), weights=3),
        r"'loss' must be a Tensor, but got \(": lambda: train_step(x(1, 2), loss=(ONE, ONE)),
        r"'loss' must be a Tensor, but got 1.5": lambda: train_step(x(1, 2), loss=1.5),
        r"'loss' must be a Tensor": lambda: step.scale(1.0),
        r"'every'": lambda: ls.LossScaleMonitor(every=10),
    }
    for words, call in calls.items():
        with pytest.raises(TypeError, match=words):
            call()
    step.begin(x(1, 2))
    with pytest.raises(ValueError, match="from 0 to 0, but got 2"):
        step.scale(ONE, 2)
    with pytest.raises(RuntimeError, match=r"can't be copied.*load_state_dict"):
        copy.deepcopy(step)
    cell = ls.ScaledTrainOneStepCell(network, sgd(network), ls.DynamicLossScale(2.0**4)).set_train()
    for inputs in ((), (None,)):
        with pytest.raises(TypeError, match="needs the inputs of a step"):
            cell.find_loss_scale(*inputs)


@quick_in_pynative_mode
def test_a_loss_that_the_steps_own_scale_scaled_is_not_warned_of(mode):
    network, scale = Slope(), ls.DynamicLossScale(2.0**4)
    step = ls.ManualStep(network, sgd(network), scale)

    def forward(data):
        return scale.scale(network(data))

    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.end(value_and_grad(step.begin(x(1, 2)))[1])
    np.testing.assert_array_equal(network.weight.asnumpy(), [-1, -2])
