"""Losses that are sums over different numbers of things. The configurations draw those whose weight is a Tensor."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn
from support.refused import refused
from support.token_networks import LEARNING_RATE, Tokens, batch, gradient, sgd, tensors, weight_of
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell


def trained(network=None, **keywords):
    network = network or Tokens()
    keywords = {"weighted": True, **keywords}
    return network, ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale(2.0**10), **keywords).set_train()


@quick_in_graph_mode
def test_without_any_weight_the_step_is_a_clean_one(mode):
    network, cell = trained(gradient_accumulation_steps=2)
    before = weight_of(network)
    for seed in range(2):
        loss, overflow, _ = cell(*tensors(batch(0, seed)))
        assert float(loss) == 0.0 and not bool(overflow)
    np.testing.assert_array_equal(weight_of(network), before)
    assert cell.counters()["applied_steps"] == 1


@quick_in_pynative_mode
@pytest.mark.parametrize("number", [3, np.int64(3), np.float32(3)])
def test_a_weight_may_be_a_number(mode, number):
    network, cell = trained(Tokens(weight_as="number"))
    network.number = number
    before = weight_of(network)
    expected = before - LEARNING_RATE * gradient(before, [batch(3)])
    cell(*tensors(batch(3)))
    np.testing.assert_allclose(weight_of(network), expected, rtol=2e-6)
    network = Tokens()
    step = ManualStep(network, sgd(network), DynamicLossScale(2.0**10))
    value_and_grad = step.value_and_grad(network, has_aux=True)
    step.end(value_and_grad(*step.begin(*tensors(batch(3))))[1], weight=number)
    np.testing.assert_allclose(weight_of(network), expected, rtol=2e-6)


class OfNumPy(nn.Cell):
    """Its gradient is its input; its weight is a number of NumPy's."""

    def __init__(self, count):
        super().__init__()
        self.weight, self.count = Parameter(Tensor([0.0, 0.0]), name="weight"), count

    def construct(self, x):
        return (self.weight * x).sum(), self.count


@pytest.mark.parametrize("count", [np.int64(4), *slow(np.float32(4), np.float64(4), np.int32(4))])
def test_a_weight_may_be_a_number_of_numpy(mode, count):
    network = OfNumPy(count)
    keywords = {"weighted": True, "gradient_accumulation_steps": 2}
    cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 1.0), DynamicLossScale(2.0**4), **keywords)
    for _ in range(2):
        cell.set_train()(Tensor([4.0, 8.0]))
    np.testing.assert_array_equal(network.weight.asnumpy(), [-1, -2])


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_is_no_weight(mode):
    for count, error, words in (
        (np.bool_(True), TypeError, "a number or a Tensor of shape (), but got True of type 'bool_'"),
        ("4", TypeError, "but got '4' of type 'str'"),
        (Tensor([4.0, 4.0]), TypeError, "but got a Tensor of shape (2,)"),
        (np.float32(np.nan), ValueError, "a finite number >= 0, but got nan"),
    ):
        network = OfNumPy(count)
        cell = ScaledTrainOneStepCell(network, nn.SGD([network.weight], 1.0), 16.0, weighted=True).set_train()
        refused(lambda: cell(Tensor([4.0, 8.0])), error, "ScaledTrainOneStepCell", words)  # noqa: B023


@quick_in_pynative_mode
def test_within_a_cycle_it_resumes_with_weights_only(mode):
    _, cell = trained(gradient_accumulation_steps=3)
    cell(*tensors(batch(1)))
    _, unweighted = trained(Tokens(weight_as="mean"), gradient_accumulation_steps=3, weighted=False)
    before = state(unweighted)
    with pytest.raises(ValueError, match=r"'weighted' must be True, but got False.*Nothing was loaded"):
        unweighted.load_state_dict({name: Tensor(value) for name, value in state(cell).items()})
    assert not changed(before, state(unweighted))
