"""The emulated NPU by itself: its register, what saturates, and the detector that reads it."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.npu_networks import LOSS_SCALE, networks_on_npu, optimizers_of

from ms_lossscale import FiniteGradients, FloatStatusRegister, ScaledTrainOneStepCell, emulation

register = emulation.register

pytestmark = pytest.mark.only_on("CPU", reason="an NPU is emulated on CPU only")


@pytest.fixture(autouse=True)
def _clear_register():
    # What earlier tests began may still be running.
    mindspore.runtime.synchronize()
    register.clear()
    register.events.clear()


def test_reading_consumes(mode):
    register.raise_status()
    assert register.raised
    status = register.read()
    assert (status.shape, status.dtype, status.any()) == ((8,), np.int32, True)
    assert not register.raised and not register.read().any()
    with emulation.saturation_mode():
        detector = FloatStatusRegister()
    register.raise_status()
    assert detector((Tensor([1.0]),)).asnumpy()
    assert not detector((Tensor([1.0]),)).asnumpy()
    assert register.events == ["get 1", "clear", "get 0", "clear"]


class SaturatedSum(nn.Cell):
    """The sum of `weight * saturate(x)`: what flows back into the saturation is the weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = Tensor(weight)
        self.saturate = emulation.Saturate("a")

    def construct(self, x):
        return (self.weight * self.saturate(x)).sum()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_saturate(mode, dtype):
    saturate, inf, nan = emulation.Saturate("a"), np.inf, np.nan
    x = np.array([65504.0, -65504.0, 2.0**-24, -0.0], dtype)
    assert saturate(Tensor(x)).asnumpy().tobytes() == x.tobytes()
    assert not register.raised
    for x, expected in (
        # Float32, too, saturates where the range of float16 ends.
        ([65505.0 if dtype == np.float32 else inf], [65504.0]),
        ([-1e38 if dtype == np.float32 else -inf], [-65504.0]),
        ([[0.0, -1.5, 65504.0], [inf, -inf, nan]], [[0.0, -1.5, 65504.0], [65504.0, -65504.0, 0.0]]),
    ):
        register.clear()
        register.events.clear()
        saturated = saturate(Tensor(np.array(x, dtype))).asnumpy()
        assert saturated.dtype == dtype
        np.testing.assert_array_equal(saturated, np.array(expected, dtype))
        assert register.raised and register.events == ["forward a"]
    register.clear()
    weight = np.array([1.0, -2.0, inf, -inf, nan], dtype)
    x = np.array([1.0, 1.0, 0.0, 0.0, 0.0], dtype)
    gradient = mindspore.grad(SaturatedSum(weight))(Tensor(x)).asnumpy()
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, np.array([1.0, -2.0, 65504.0, -65504.0, 0.0], dtype))
    assert register.raised and register.events[-1] == "backward a"


class Inner(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 2)
        self.further, self.by_name = nn.CellList([]), nn.CellDict()
        self.scale = Parameter(Tensor(2.0), name="scale")

    def construct(self, x):
        return self.dense(x) * self.scale


class Outer(nn.Cell):
    """Cells in a SequentialCell, in a CellList, and in a cell that computes something itself; empty containers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(2, 2), nn.ReLU(), nn.SequentialCell())
        self.inner = Inner()
        self.heads = nn.CellList([nn.Dense(2, 1)])

    def construct(self, x):
        return self.heads[0](self.inner(self.layers(x)))


class UsedTwice(nn.Cell):
    """One cell in two places, and a block under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(2, 2)
        self.block = nn.SequentialCell(self.first, nn.Sigmoid())
        self.same_block = self.block

    def construct(self, x):
        return self.same_block(self.first(x))


def outer():
    network = Outer()
    for i, parameter in enumerate(network.get_parameters()):
        ops.assign(parameter, Tensor(np.random.default_rng(i).normal(size=parameter.shape).astype(np.float32)))
    return network


def test_a_network_keeps_names_results_in_range_and_empty_containers(mode):
    network, saturated = outer(), outer()
    assert emulation.saturate(saturated) is saturated
    assert list(saturated.parameters_dict()) == list(network.parameters_dict())
    x = Tensor(np.ones((3, 2), np.float32))
    np.testing.assert_array_equal(saturated(x).asnumpy(), network(x).asnumpy())
    assert register.events == ["forward layers.0", "forward layers.1", "forward inner.dense", "forward heads.0"]
    assert not register.raised
    assert [*map(len, (saturated.layers[2], saturated.inner.further, saturated.inner.by_name))] == [0, 0, 0]


class Recurrent(nn.Cell):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3)

    def construct(self, x):
        output, (hidden, memory) = self.lstm(x)
        return output.sum() + hidden.sum() + memory.sum()


def test_tuples_within_tuples(mode):
    network = emulation.saturate(Recurrent())
    x = Tensor(np.full((1, 1, 2), 1.0, np.float32))
    loss, grads = mindspore.value_and_grad(network, None, network.trainable_params())(x)
    assert all(np.isfinite(each.asnumpy()).all() for each in (loss, *grads))
    mindspore.runtime.synchronize()
    assert register.events.count("forward lstm.rnn") == 3 and "backward lstm.rnn" in register.events


def test_named_cells_only(mode):
    network = emulation.saturate(outer(), ["inner", "heads.0"])
    assert list(network.parameters_dict()) == list(outer().parameters_dict())
    assert np.isfinite(network(Tensor(np.full((1, 2), np.inf, np.float32))).asnumpy()).all()
    assert register.events == ["forward inner", "forward heads.0"]
    assert register.raised


def test_a_cell_that_is_registered_under_several_names(mode):
    names = [parameter.name for parameter in UsedTwice().get_parameters()]
    network = emulation.saturate(UsedTwice())
    assert [parameter.name for parameter in network.get_parameters()] == names
    # Replaced within the block, and where it stands by itself; the block's other cell as well.
    assert np.isfinite(network(Tensor(np.full((1, 2), np.inf, np.float32))).asnumpy()).all()
    assert register.events == ["forward first", "forward first", "forward block.1"]
    assert network.first is network.block[0]
    assert network.block is network.same_block


def test_what_is_no_cell_or_no_name():
    with pytest.raises(ValueError, match=r"'cells' must name cells inside the network, but got 'iner'.*inner\.dense"):
        emulation.saturate(Outer(), ["iner"])
    with pytest.raises(TypeError, match="'network' must be a Cell, but got 3"):
        emulation.saturate(3)


def test_saturation_mode_chooses_the_cleared_register_and_puts_back_what_was_after_an_error_too():
    network = networks_on_npu(1)[0]

    def detector():
        return ScaledTrainOneStepCell(network, optimizers_of([network])[0], LOSS_SCALE).overflow_detector

    operators = FloatStatusRegister.operators
    assert isinstance(detector(), FiniteGradients)
    register.raise_status()
    register.events.append("something")
    with pytest.raises(KeyError), emulation.saturation_mode() as yielded:
        assert yielded is register
        assert not register.raised and register.events == []
        assert isinstance(detector(), FloatStatusRegister)
        raise KeyError
    assert FloatStatusRegister.operators == operators
    with emulation.saturation_mode():
        assert FloatStatusRegister.operators != operators
    assert FloatStatusRegister.operators == operators
    assert isinstance(detector(), FiniteGradients)
