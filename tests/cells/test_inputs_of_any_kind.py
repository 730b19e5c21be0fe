"""Inputs are whatever the network takes: besides Tensors bools, None, numbers, strings, tuples and lists of them, and
in PyNative mode dicts; with every keyword, and in `find_loss_scale`."""

import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import Linear, batch
from support.python_process import skip_with_older_mindspore
from support.training import by_sgd

import ms_lossscale as ls

X = Tensor(np.array([1.0, 2.0], np.float32))
# Each trains its weight with the gradient FACTOR * X.
FACTOR = 8.0


class Takes(nn.Cell):
    def __init__(self, name="weight"):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros(2, np.float32)), name=name)

    def construct(self, x, flag, nothing, number, word, pair, nested):
        first, two = pair
        inner, _ = nested
        factor = number if flag and nothing is None and word == "sum" else 0
        loss = (self.weight.astype(mstype.float16) * (first * (factor * two * inner[1])).astype(mstype.float16)).sum()
        return loss + 0 * x.sum()


class TakesDict(Takes):
    def construct(self, x, values):
        return super().construct(x, **values)


class Several(Takes):  # One network with two losses.
    def __init__(self):
        super().__init__()
        self.other = Takes("other")

    def construct(self, *inputs):
        return super().construct(*inputs), self.other(*inputs)


def inputs():
    return [X, True, None, 2, "sum", [X, 2.0], ((X, 2), "word")]


def inputs_with_a_dict():
    names = ("flag", "nothing", "number", "word", "pair", "nested")
    return [X, dict(zip(names, inputs()[1:]))]


def make(kind, network=Takes, **keywords):
    scale = ls.DynamicLossScale(2.0**14)
    if kind == "of one":
        network = Several()
        optimizers = [nn.SGD([weight], 1.0) for weight in network.trainable_params()]
        return ls.SimultaneousTrainOneStepCell(network, optimizers, scale, **keywords).set_train()
    networks = [network("a"), network("b")]
    return by_sgd(networks[0] if kind == "scaled" else networks, scale, 1.0, kind, **keywords)


def check(cell, values):
    """The gradient overflows in float16 from a scale of 2**12 on, so that the first call is tried again."""
    cell(*values)
    for weight in cell.network.trainable_params():
        np.testing.assert_array_equal(weight.asnumpy(), -FACTOR * X.asnumpy())
    assert set(np.atleast_1d(cell.get_loss_scale())) == {2.0**11}
    # Half of the largest one at which nothing overflows.
    assert set(np.atleast_1d(cell.find_loss_scale(*values))) == {2.0**10}


@pytest.mark.parametrize("kind", ["scaled", "of one", *slow("simultaneous", "alternating")])
def test_each_cell_takes_them(mode, kind):
    if kind == "alternating" and mode == "graph":
        skip_with_older_mindspore("MindSpore 2.7 can't pass a list on into a branch, in which a network's turn is")
    check(make(kind, max_retries=5), inputs())


def test_an_array_of_numpy_is_told_apart(mode):
    cell = by_sgd(Linear(), ls.DynamicLossScale())
    with pytest.raises(RuntimeError, match=r"input 1 is a numpy\.ndarray"):
        cell(batch()[0], batch()[1].asnumpy())
    assert not bool(cell(*batch())[1])


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("kind", ["scaled", *slow("simultaneous", "alternating")])
def test_pynative_mode_takes_dicts(mode, kind):
    check(make(kind, TakesDict, max_retries=5), inputs_with_a_dict())


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_a_network_gets_the_very_tensors_that_a_tuple_with_a_string_has(mode):
    """Where a network with several losses is compiled."""
    cell = make("of one")
    cell.set_loss_scale(2.0**4)
    first, second = inputs(), inputs()
    second[5], second[6] = [3 * X, 2.0], ((X, 4), "word")
    for values in (first, second):
        cell(*values)
    for weight in cell.network.trainable_params():
        np.testing.assert_array_equal(weight.asnumpy(), -7 * FACTOR * X.asnumpy())


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_a_manual_step_returns_them_as_they_are(mode):
    network = TakesDict()
    step = by_sgd(network, ls.DynamicLossScale(2.0**4), 1.0, "manual")
    value_and_grad = step.value_and_grad(network)
    for _ in range(2):
        seen = step.begin(*inputs_with_a_dict())
        assert seen[1]["word"] == "sum" and seen[1]["nothing"] is None
        step.end(value_and_grad(*seen)[1])
    np.testing.assert_array_equal(network.weight.asnumpy(), -2 * FACTOR * X.asnumpy())


class CountsCalls(nn.Cell):
    """Its loss is infinite if `factor` is."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(1.0), name="weight")
        self.calls = Parameter(Tensor(0.0), name="calls", requires_grad=False)
        self.factor = Parameter(Tensor(1.0), name="factor", requires_grad=False)
        self.one = Tensor(1.0)

    def construct(self, *inputs):
        ops.assign(self.calls, self.calls + self.one)
        return ops.square(self.weight * self.factor)


@pytest.mark.parametrize("values", [(), (2.0,), ("a", True), ((1, 2),)], ids=["none", "number", "words", "numbers"])
def test_without_a_tensor_what_a_skipped_step_wrote_is_undone(mode, values):
    network = CountsCalls()
    cell = by_sgd(network, ls.DynamicLossScale(), max_retries=1 if values else 0)
    for factor, calls in ((1.0, 1), (np.inf, 1), (1.0, 2)):
        ops.assign(network.factor, Tensor(factor, mstype.float32))
        cell(*values)
        assert network.calls.asnumpy() == calls
    cell.find_loss_scale(*values)
    assert network.calls.asnumpy() == 2
