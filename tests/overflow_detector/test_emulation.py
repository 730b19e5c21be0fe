"""The emulated NPU by itself: its register, what saturates, and the detector that reads it."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.npu_networks import LOSS_SCALE, networks_on_npu, optimizers_of

from ms_lossscale import FiniteGradients, FloatStatusRegister, ScaledTrainOneStepCell, emulation

register = emulation.register

FLOATS = [np.float16, np.float32]


@pytest.fixture(autouse=True)
def _clear_register():
    # What earlier tests began may still be running.
    mindspore.runtime.synchronize()
    register.clear()
    register.events.clear()


class TestRegister:
    def test_reading_consumes(self):
        register.raise_status()
        assert register.raised
        status = register.read()
        assert status.shape == (8,)
        assert status.dtype == np.int32
        assert status.any()
        assert not register.raised
        assert not register.read().any()

    def test_the_detector_reads_and_clears(self, mode):
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


@pytest.mark.parametrize("dtype", FLOATS)
class TestSaturate:
    def test_forward(self, mode, dtype):
        x = np.array([[0.0, -1.5, 65504.0], [np.inf, -np.inf, np.nan]], dtype)
        saturated = emulation.Saturate("a")(Tensor(x)).asnumpy()
        assert saturated.dtype == dtype
        np.testing.assert_array_equal(saturated, np.array([[0.0, -1.5, 65504.0], [65504.0, -65504.0, 0.0]], dtype))
        assert register.raised
        assert register.events == ["forward a"]

    def test_values_in_range_are_left_alone(self, mode, dtype):
        x = np.array([65504.0, -65504.0, 2.0**-24, -0.0], dtype)
        saturated = emulation.Saturate()(Tensor(x)).asnumpy()
        assert saturated.tobytes() == x.tobytes()
        assert not register.raised

    def test_backward(self, mode, dtype):
        weight = np.array([1.0, -2.0, np.inf, -np.inf, np.nan], dtype)
        x = np.array([1.0, 1.0, 0.0, 0.0, 0.0], dtype)
        gradient = mindspore.grad(SaturatedSum(weight))(Tensor(x)).asnumpy()
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, np.array([1.0, -2.0, 65504.0, -65504.0, 0.0], dtype))
        assert register.raised
        assert register.events[-1] == "backward a"


@pytest.mark.parametrize("value", [65505.0, -1e38])
def test_saturates_float32_to_the_range_of_float16(mode, value):
    saturated = emulation.Saturate()(Tensor(np.float32([value])))
    assert saturated.asnumpy() == np.copysign(65504.0, value)
    assert register.raised


class Inner(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 2)
        self.scale = Parameter(Tensor(2.0), name="scale")

    def construct(self, x):
        return self.dense(x) * self.scale


class Outer(nn.Cell):
    """Cells in a SequentialCell, in a CellList, and in a cell that computes something itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(2, 2), nn.ReLU())
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


class TestSaturateNetwork:
    def make(self):
        network = Outer()
        for i, parameter in enumerate(network.get_parameters()):
            ops.assign(parameter, Tensor(np.random.default_rng(i).normal(size=parameter.shape).astype(np.float32)))
        return network

    def test_keeps_names_and_results_in_range(self, mode):
        network, saturated = self.make(), self.make()
        assert emulation.saturate(saturated) is saturated
        assert list(saturated.parameters_dict()) == list(network.parameters_dict())
        x = Tensor(np.ones((3, 2), np.float32))
        np.testing.assert_array_equal(saturated(x).asnumpy(), network(x).asnumpy())
        assert register.events == ["forward layers.0", "forward layers.1", "forward inner.dense", "forward heads.0"]
        assert not register.raised

    def test_named_cells_only(self, mode):
        network = emulation.saturate(self.make(), ["inner", "heads.0"])
        assert list(network.parameters_dict()) == list(self.make().parameters_dict())
        output = network(Tensor(np.full((1, 2), np.inf, np.float32)))
        assert np.isfinite(output.asnumpy()).all()
        assert register.events == ["forward inner", "forward heads.0"]
        assert register.raised

    def test_a_cell_that_is_registered_under_several_names(self, mode):
        names = [parameter.name for parameter in UsedTwice().get_parameters()]
        network = emulation.saturate(UsedTwice())
        assert [parameter.name for parameter in network.get_parameters()] == names
        # Replaced within the block, and where it stands by itself; the block's other cell as well.
        output = network(Tensor(np.full((1, 2), np.inf, np.float32))).asnumpy()
        assert np.isfinite(output).all()
        assert register.events == ["forward first", "forward first", "forward block.1"]
        assert network.first is network.block[0]
        assert network.block is network.same_block

    def test_empty_containers_stay(self, mode):
        network = self.make()
        network.layers.append(nn.SequentialCell())
        network.inner.further, network.inner.by_name = nn.CellList([]), nn.CellDict()
        emulation.saturate(network)
        network(Tensor(np.ones((1, 2), np.float32))).asnumpy()
        assert register.events == ["forward layers.0", "forward layers.1", "forward inner.dense", "forward heads.0"]
        assert [len(each) for each in (network.layers[2], network.inner.further, network.inner.by_name)] == [0, 0, 0]

    def test_a_name_that_does_not_exist(self):
        with pytest.raises(
            ValueError, match=r"'cells' must name cells inside the network, but got 'iner'.*inner\.dense"
        ):
            emulation.saturate(Outer(), ["iner"])

    def test_what_is_no_cell(self):
        with pytest.raises(TypeError, match="'network' must be a Cell, but got 3"):
            emulation.saturate(3)


class TestSaturationMode:
    def test_chooses_the_register_and_puts_back_what_was(self):
        network = networks_on_npu(1)[0]

        def detector():
            return ScaledTrainOneStepCell(network, optimizers_of([network])[0], LOSS_SCALE).overflow_detector

        operators = FloatStatusRegister.operators
        assert isinstance(detector(), FiniteGradients)
        with emulation.saturation_mode() as yielded:
            assert yielded is register
            assert isinstance(detector(), FloatStatusRegister)
        assert isinstance(detector(), FiniteGradients)
        assert FloatStatusRegister.operators == operators

    def test_puts_back_after_an_error_too(self):
        operators = FloatStatusRegister.operators
        with pytest.raises(KeyError), emulation.saturation_mode():
            raise KeyError
        assert FloatStatusRegister.operators == operators

    def test_begins_with_a_clear_register_and_an_empty_log(self):
        register.raise_status()
        register.events.append("something")
        with emulation.saturation_mode():
            assert not register.raised
            assert register.events == []
