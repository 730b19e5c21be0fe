"""locate_overflow names the first cell that overflows, in the forward or else in the backward, and what it held."""

import inspect

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.diagnosed_cells import BATCHES, CELLS, gan
from support.gan_networks import gan_batch
from support.networks import FEATURES, HalfPrecision, Linear, batch
from support.planted_networks import FLOAT16_MAX, PLANTED, Chain, Function, rows, times
from support.untouched import untouched

from ms_lossscale import (
    OverflowTrace,
    ScaledTrainOneStepCell,
    advise_float32,
    emulation,
    locate_overflow,
    profile_activations,
    profile_gradients,
)


@quick_in_graph_mode
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_the_planted_cell_is_named(mode, planted):
    network = planted.network()
    with untouched(network):
        trace = locate_overflow(network, [planted.x], loss_scale=planted.loss_scale)
    assert f"{trace.cell} {trace.direction} {trace.what} {trace.kind}" == planted.says
    assert trace.index == planted.index
    np.testing.assert_equal(np.float32(trace.value), np.float32(planted.value))
    assert (trace.found, trace.loss_scale) == (True, planted.loss_scale)
    assert trace.note.endswith(planted.note) and bool(trace.note) == bool(planted.note)
    assert planted.printed in str(trace) and str(trace).endswith(planted.note)
    report = profile_activations(network, [(planted.x,)], loss_scale=planted.loss_scale)
    (seen,) = [its for its in report.activations if (its.place.cell, its.kind) == (trace.cell, "output")]
    assert seen.distribution.non_finite == planted.non_finite


def test_what_a_trace_holds():
    trace = locate_overflow(PLANTED["inf"].network(), [PLANTED["inf"].x], loss_scale=1.0)
    assert tuple(trace.tensor) == ("Float16", (2, 2), 2400.0, 2400.0, 2)
    assert [tuple(each) for each in trace.inputs] == [("Float16", (2, 2), 8.0, 800.0, 0)]
    trace = locate_overflow(Linear(), [batch()], loss_scale=2.0**10)
    assert trace == OverflowTrace(False, 2.0**10)
    assert str(trace) == (
        "No overflow: all values are finite and below 65504 in float16 at loss scale 1024 in training mode "
        "(train=False looks at evaluation)."
    )
    assert not locate_overflow(PLANTED["backward"].network(), [PLANTED["backward"].x], loss_scale=64.0).found


def test_the_first_of_several_batches_and_the_scale_of_a_cell():
    planted = PLANTED["inf"]
    trace = locate_overflow(planted.network(), [rows(1.0, 1.0), planted.x, planted.x])
    assert (trace.batch, trace.loss_scale, trace.cell) == (1, 1.0, planted.says.split()[0])
    assert str(trace).startswith("The first overflow of batches[1] at loss scale 1 in training mode is in the forward ")
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), 2.0**20)
    assert locate_overflow(cell, [batch()]).loss_scale == 2.0**20


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_batch_that_is_not_finite(value):
    x, y = (tensor.asnumpy() for tensor in batch())
    x[2, 1] = value
    network = nn.WithLossCell(nn.SequentialCell(nn.Dense(FEATURES, 1, weight_init="ones")), nn.MSELoss())
    trace = locate_overflow(network, [(x, y)], loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.index) == ("_backbone.0", "forward", (2, 0))
    assert trace.note == "The batch itself holds values that are not finite."
    assert trace.inputs[0].non_finite == 1


def test_a_float16_loss_that_the_scale_does_not_fit():
    trace = locate_overflow(HalfPrecision(), [batch()], loss_scale=2.0**16)
    assert (trace.cell, trace.direction, trace.what, trace.kind) == ("HalfPrecision", "backward", "loss", "inf")
    assert trace.note == "The loss is float16, and the loss scale 65536 does not fit: cast the loss to float32."
    # Of a loss cell around it likewise.
    network = nn.WithLossCell(nn.Dense(FEATURES, 1).to_float(mstype.float16), nn.MSELoss())
    inputs = tuple(tensor.astype(mstype.float16) for tensor in batch())
    assert locate_overflow(network, [inputs], loss_scale=2.0**16).what == "loss"


@pytest.mark.slow
def test_saturated_values_of_an_emulated_npu(mode):
    with emulation.saturation_mode():
        network = Chain(times(4.0), times(300.0), times(0.001), dtype=mstype.float32)
        emulation.saturate(network)
        trace = locate_overflow(network, [rows(1.0, 100.0)], loss_scale=1.0)
    assert trace.cell.startswith("cells_.1")
    assert (trace.direction, trace.kind, trace.index, trace.value) == ("forward", "saturated", (1, 0), FLOAT16_MAX)


class RaisesRegister(nn.Cell):
    """Returns its input. Its backward raises the register, as on some devices that of a pooling."""

    def __init__(self):
        super().__init__()
        self._backward = ops.Custom(self._raise, lambda its: its, lambda its: its, func_type="pyfunc")

    def _raise(self, values):
        emulation.register.raise_status()
        return values

    def construct(self, x):
        return x * 1.0

    def bprop(self, _x, _out, dout):
        return (self._backward(dout),)


def test_a_register_that_is_up_though_all_values_are_finite_gets_a_sentence():
    network = nn.SequentialCell(nn.Dense(2, 3), RaisesRegister(), nn.Dense(3, 1))
    x = Tensor(np.ones((4, 2), np.float32))
    assert "register" not in str(locate_overflow(network, [x], loss_scale=1.0))
    with emulation.saturation_mode():
        trace = locate_overflow(network, [x], loss_scale=1.0)
        assert not trace.found
        assert "But the NPU's status register is up: " in str(trace)
        assert not emulation.register.raised
        assert "register" not in str(locate_overflow(nn.Dense(2, 1), [x], loss_scale=1.0))


@pytest.mark.parametrize("kind", ["scaled", *slow("with aux", "tuple", "alternating")])
def test_a_training_cell(kind):
    cell, batches, _ = CELLS[kind]()
    inputs = batches[0]
    with untouched(cell.set_train()):
        assert not locate_overflow(cell, [inputs], loss_scale=1.0).found
    x = np.where(np.arange(inputs[0].size).reshape(inputs[0].shape) == 0, np.float32(np.inf), inputs[0].asnumpy())
    trace = locate_overflow(cell, [(Tensor(x), *inputs[1:])], loss_scale=1.0)
    assert (trace.found, trace.direction) == (True, "forward")
    assert trace.note == "The batch itself holds values that are not finite."
    # The generator does not take the first input.
    assert trace.cell.startswith("networks[1].") == (kind == "alternating")


@pytest.mark.parametrize("kind, network", [("simultaneous", 0), ("simultaneous", 1), *slow(("tuple", 1))])
def test_the_network_whose_loss_is_infinite(kind, network):
    trace = locate_overflow(gan(kind)[0], [gan_batch(overflow_in=(network,))], loss_scale=1.0)
    name = "GanLosses" if kind == "tuple" else f"networks[{network}]"
    assert (trace.cell, trace.direction, trace.kind, trace.index) == (name, "forward", "inf", ())


def test_weights_that_are_not_finite_are_named_where_the_loss_hides_them():
    # Like a ReLU on CPU, it makes NaN zero.
    hides_nan = Function(lambda x: ops.select(x == x, x, ops.zeros_like(x)))
    net = nn.SequentialCell(nn.Dense(2, 3), hides_nan, nn.Dense(3, 1)).to_float(mstype.float16)
    ops.assign(net[0].weight, Tensor([[1, np.nan], [np.nan, 1], [1, 1]], mstype.float32))
    network = nn.WithLossCell(net, nn.MSELoss())
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1), 1.0)
    trace = locate_overflow(cell, [(np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32))], loss_scale=1.0)
    remark = "Weights themselves are infinite or NaN: 0.weight (2 values). No loss scale and no cell in float32 mends"
    assert (trace.cell, trace.kind, trace.note.startswith(remark)) == ("_backbone.0", "NaN", True)


@pytest.mark.parametrize(
    "diagnose, network, inputs, loss_scale, error, message",
    [
        (locate_overflow, "network", BATCHES, 1.0, TypeError, "'network' must be a Cell, but got 'network'"),
        (locate_overflow, Linear(), [print], 1.0, TypeError, r"'batches\[0\]' must be a Tensor, a NumPy array"),
        (locate_overflow, Linear(), BATCHES, 0.0, ValueError, "'loss_scale' must be a finite number > 0"),
        (locate_overflow, Linear(), BATCHES, "1", TypeError, "'loss_scale' must be a number, but got '1'"),
        (profile_activations, None, BATCHES, None, TypeError, "'network' must be a Cell, but got None"),
        (profile_activations, Linear(), [], None, ValueError, "'batches' must not be empty"),
        (profile_activations, Linear(), None, None, TypeError, "'batches' must be an iterable of batches, but got N"),
        (profile_activations, Linear(), BATCHES, -1, ValueError, "'loss_scale' must be a finite number > 0"),
    ],
)
def test_wrong_arguments(diagnose, network, inputs, loss_scale, error, message):
    with pytest.raises(error, match=f"For '{diagnose.__name__}', .*{message}"):
        diagnose(network, inputs, loss_scale=loss_scale)


def test_all_four_look_alike():
    for diagnose in (profile_gradients, profile_activations, locate_overflow, advise_float32):
        parameters = list(inspect.signature(diagnose).parameters.values())
        assert [each.name for each in parameters[:4]] == ["network", "batches", "parameters", "loss_scale"]
        assert [each.kind for each in parameters[2:]] == [inspect.Parameter.KEYWORD_ONLY] * len(parameters[2:])
