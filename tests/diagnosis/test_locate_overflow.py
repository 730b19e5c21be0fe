"""locate_overflow names the first cell that overflows, in the forward or else in the backward, and what it held."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.gan_networks import gan_batch
from support.networks import FEATURES, HalfPrecision, Linear, batch
from support.untouched import untouched
from test_profile_gradients import BATCHES, CELLS, Failing, gan, wrong_shape

from ms_lossscale import OverflowTrace, emulation, locate_overflow
from ms_lossscale.diagnosis.locate_overflow import Range

pytestmark = pytest.mark.slow

FLOAT16_MAX = 65504.0


class Multiply(nn.Cell):
    """Multiplies by a constant."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def construct(self, x):
        return x * self.factor


class Function(nn.Cell):
    """Any function of a tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, x):
        return self.function(x)


class Chain(nn.Cell):
    """A layer with weights, then cells one after the other, and the mean of their squares in float32."""

    def __init__(self, *cells, dtype=mstype.float16):
        super().__init__()
        self.first = nn.Dense(2, 2, weight_init="ones", has_bias=False)
        self.cells_ = nn.SequentialCell(*cells)
        if dtype == mstype.float16:
            self.first.to_float(dtype)
            self.cells_.to_float(dtype)

    def construct(self, x):
        return self.cells_(self.first(x)).astype(mstype.float32).mean()


def rows(*values):
    """An input whose first layer puts out twice these values, in both columns."""
    return Tensor(np.repeat(np.float32(values)[:, None], 2, axis=1))


# The forward.


def test_infinity_in_the_forward(mode):
    network = Chain(Multiply(4.0), Multiply(300.0), Multiply(3.0))
    with untouched(network):
        trace = locate_overflow(network, rows(1.0, 100.0), loss_scale=1.0)
    assert trace.found
    assert (trace.cell, trace.direction, trace.what) == ("cells_.1", "forward", "output")
    assert (trace.kind, trace.index, trace.value) == ("inf", (1, 0), np.inf)
    # 2, 200 -> 8, 800 -> 2400, 240000.
    assert trace.tensor == Range("Float16", (2, 2), 2400.0, 2400.0, 2)
    assert trace.inputs == (Range("Float16", (2, 2), 8.0, 800.0, 0),)
    assert trace.note == ""
    assert trace.loss_scale == 1.0
    assert str(trace) == (
        "The first overflow at loss scale 1 is in the forward of cells_.1: its output is inf (inf) at (1, 0)\n"
        "  tensor: Float16 (2, 2): 2400 to 2400, 2 non-finite\n"
        "  the cell's input 0: Float16 (2, 2): 8 to 800"
    )


def test_nan_in_the_forward():
    network = Chain(Multiply(1.0), Function(lambda x: ops.log(x)), Multiply(2.0))
    trace = locate_overflow(network, rows(1.0, -0.5), loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.kind, trace.index) == ("cells_.1", "forward", "NaN", (1, 0))
    assert np.isnan(trace.value)
    assert trace.inputs == (Range("Float16", (2, 2), -1.0, 2.0, 0),)
    assert "is NaN (nan) at (1, 0)" in str(trace)


def test_the_largest_float16_counts_as_saturated():
    network = Chain(Function(lambda x: ops.minimum(x * 1000.0, Tensor(FLOAT16_MAX, mstype.float16))), Multiply(0.001))
    trace = locate_overflow(network, rows(1.0, 200.0), loss_scale=1.0)
    assert (trace.cell, trace.kind, trace.index, trace.value) == ("cells_.0", "saturated", (1, 0), FLOAT16_MAX)


class BetweenCells(nn.Cell):
    """Overflows in its own construct, between two cells."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(2, 2, weight_init="ones", has_bias=False).to_float(mstype.float16)
        self.second = Multiply(0.5)

    def construct(self, x):
        return self.second(self.first(x) * 1000.0).astype(mstype.float32).mean()


def test_an_overflow_between_cells():
    trace = locate_overflow(BetweenCells(), rows(1.0, 100.0), loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.kind, trace.index) == ("second", "forward", "inf", (1, 0))
    assert trace.inputs == (Range("Float16", (2, 2), 2000.0, 2000.0, 2),)
    assert trace.note.startswith("Its input is not finite already, though no cell put that out: it was computed")
    assert str(trace).endswith(trace.note)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_batch_that_is_not_finite(value):
    x, y = (tensor.asnumpy() for tensor in batch())
    x[2, 1] = value
    network = nn.WithLossCell(nn.SequentialCell(nn.Dense(FEATURES, 1, weight_init="ones")), nn.MSELoss())
    trace = locate_overflow(network, (x, y), loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.index) == ("_backbone.0", "forward", (2, 0))
    assert trace.note == "The batch itself holds values that are not finite."
    assert trace.inputs[0].non_finite == 1


# Values that float32 holds and float16 does not.


def test_a_value_that_only_float16_cannot_hold():
    network = Chain(Multiply(1e5), Multiply(1e-5), dtype=mstype.float32)
    trace = locate_overflow(network, rows(1.0, 2.0), loss_scale=1.0)
    assert trace.found
    assert (trace.cell, trace.direction, trace.kind) == ("cells_.0", "forward", "saturated")
    assert (trace.index, trace.value) == ((0, 0), np.float32(2e5))
    assert trace.note == "Float32 holds this value; float16 could not."


def test_a_value_that_a_cast_to_float16_makes_infinite():
    network = Chain(Multiply(1e5), Multiply(1e-5).to_float(mstype.float16), dtype=mstype.float32)
    trace = locate_overflow(network, rows(1.0, 2.0), loss_scale=1.0)
    assert (trace.cell, trace.kind, trace.value) == ("cells_.0", "saturated", np.float32(2e5))
    assert trace.note == "Float32 holds this value; float16 could not."


def test_a_large_float32_value_is_not_named_for_another_overflow():
    network = Chain(Multiply(1e5), Multiply(1e-5), Function(lambda x: ops.log(x - 4.0)), dtype=mstype.float32)
    trace = locate_overflow(network, rows(1.0, 2.0), loss_scale=1.0)
    assert (trace.cell, trace.kind, trace.index) == ("cells_.2", "NaN", (0, 0))


# The backward.


def test_infinity_in_the_backward_of_a_float16_cell(mode):
    # The gradient that reaches the cells is 1024 / 2; cells_.1 makes it 10 000 times larger.
    network = Chain(Multiply(0.01), Multiply(300.0), Multiply(1.0))
    trace = locate_overflow(network, rows(1.0), loss_scale=1024.0)
    assert (trace.cell, trace.direction, trace.what) == ("cells_.1", "backward", "gradient")
    assert (trace.kind, trace.index, trace.value) == ("inf", (0, 0), np.inf)
    assert trace.tensor == Range("Float16", (1, 2), None, None, 2)
    np.testing.assert_allclose(trace.inputs[0].max, 0.02, rtol=1e-3)
    assert trace.note == ""
    assert "is in the backward of cells_.1: the gradient that it passes back is inf" in str(trace)
    assert "tensor: Float16 (1, 2): no finite value, 2 non-finite" in str(trace)
    assert not locate_overflow(network, rows(1.0), loss_scale=64.0).found


def test_the_gradient_of_a_weight_only():
    # The gradient of the layer's output is 512, of its weight 512 times the inputs' sum.
    network = Chain(Multiply(1.0))
    trace = locate_overflow(network, rows(200.0), loss_scale=1024.0)
    assert (trace.cell, trace.direction, trace.what) == ("first", "backward", "first.weight")
    assert (trace.kind, trace.index) == ("inf", (0, 0))
    assert trace.inputs == (Range("Float32", (1, 2), 200.0, 200.0, 0),)
    assert "in the backward of first: the gradient of first.weight is inf (inf) at (0, 0)" in str(trace)


def test_a_float16_loss_that_the_scale_does_not_fit():
    trace = locate_overflow(HalfPrecision(), batch(), loss_scale=2.0**16)
    assert (trace.cell, trace.direction, trace.what, trace.kind) == ("HalfPrecision", "backward", "loss", "inf")
    assert trace.note == "The loss is float16, and the loss scale 65536 does not fit: cast the loss to float32."
    assert "the gradient of the loss is inf" in str(trace)
    # Of a loss cell around it likewise.
    x, y = (tensor.astype(mstype.float16) for tensor in batch())
    network = nn.WithLossCell(nn.Dense(FEATURES, 1).to_float(mstype.float16), nn.MSELoss())
    assert locate_overflow(network, (x, y), loss_scale=2.0**16).what == "loss"


def test_no_overflow():
    trace = locate_overflow(Linear(), batch(), loss_scale=2.0**10)
    assert trace == OverflowTrace(False, 2.0**10)
    assert str(trace) == "No overflow: all values are finite and below 65504 in float16 at loss scale 1024."


# Saturation mode.


def test_saturated_values_of_an_emulated_npu(mode):
    with emulation.saturation_mode():
        network = Chain(Multiply(4.0), Multiply(300.0), Multiply(0.001), dtype=mstype.float32)
        emulation.saturate(network)
        trace = locate_overflow(network, rows(1.0, 100.0), loss_scale=1.0)
    assert trace.cell.startswith("cells_.1")
    assert (trace.direction, trace.kind, trace.index, trace.value) == ("forward", "saturated", (1, 0), FLOAT16_MAX)


# The training cells.


@pytest.mark.parametrize("kind", CELLS)
def test_a_training_cell(mode, kind):
    cell, batches, _ = CELLS[kind]()
    cell.set_train()
    inputs = batches[0]
    with untouched(cell):
        assert not locate_overflow(cell, inputs, loss_scale=1.0).found
    x = inputs[0].asnumpy().copy()
    x[0, 0] = np.inf
    trace = locate_overflow(cell, (Tensor(x), *inputs[1:]), loss_scale=1.0)
    assert (trace.found, trace.direction) == (True, "forward")
    assert trace.note == "The batch itself holds values that are not finite."
    if kind.startswith(("simultaneous", "alternating")):
        # The generator does not take the first input.
        assert trace.cell.startswith("networks[1].")


@pytest.mark.parametrize("kind", ["simultaneous", "tuple", "alternating"])
@pytest.mark.parametrize("network", [0, 1])
def test_the_network_whose_loss_is_infinite(kind, network):
    cell, _, _ = gan(kind)
    trace = locate_overflow(cell, gan_batch(overflow_in=(network,)), loss_scale=1.0)
    name = "GanLosses" if kind == "tuple" else f"networks[{network}]"
    assert (trace.cell, trace.direction, trace.kind) == (name, "forward", "inf")
    assert trace.index == ()


# Bad input.


def test_a_forward_that_fails(mode):
    network = Failing()
    message = "For 'locate_overflow', the network fails on these inputs in PyNative mode, in which the diagnosis runs, "
    with untouched(network), pytest.raises(RuntimeError, match=message):
        locate_overflow(network, wrong_shape(), loss_scale=1.0)


@pytest.mark.parametrize(
    "network, inputs, loss_scale, error, message",
    [
        ("network", BATCHES[0], 1.0, TypeError, "'network' must be a Cell, but got 'network'"),
        (
            Linear(),
            3,
            1.0,
            TypeError,
            "'inputs' must be a Tensor, a NumPy array, or a tuple of them and of .*, but got 3",
        ),
        (Linear(), BATCHES, 1.0, TypeError, "'inputs' must be a Tensor, a NumPy array, or a tuple of them"),
        (Linear(), BATCHES[0], 0.0, ValueError, "'loss_scale' must be a finite number > 0"),
        (Linear(), BATCHES[0], None, TypeError, "'loss_scale' must be a number, but got None"),
    ],
)
def test_wrong_arguments(network, inputs, loss_scale, error, message):
    with pytest.raises(error, match=f"For 'locate_overflow', .*{message}"):
        locate_overflow(network, inputs, loss_scale=loss_scale)
