"""A status register that an operator raises by itself: no value overflows, and all diagnoses name the cell."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Tensor, nn, ops
from support.untouched import untouched

from ms_lossscale import (
    DynamicLossScale,
    FiniteGradients,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    advise_float32,
    emulation,
    locate_overflow,
)


def same(argument):
    return argument


def operator(function, **keywords):
    return ops.Custom(function, same, same, func_type="pyfunc", **keywords)


class Raises(nn.Cell):
    """
    Returns its input. Its forward or backward raises the register: always, as on some devices that of a pooling, or
    where a value times `factor` leaves float16's range, as if within the operator.
    """

    def __init__(self, direction, factor=None):
        super().__init__()
        self._factor = factor
        self._backward = operator(self._raise if direction == "backward" else same)
        self._forward = operator(self._raise if direction == "forward" else same, bprop=self._bprop)

    def _raise(self, values):
        if self._factor is None or np.abs(values * self._factor).max() > emulation.FLOAT16_MAX:
            emulation.register.raise_status()
        return values

    def _bprop(self, _x, _out, dout):
        return (self._backward(dout),)

    def construct(self, x):
        return self._forward(x)


class Network(nn.Cell):
    def __init__(self, middle, prefix=""):
        super().__init__()
        self.first, self.middle, self.last = nn.Dense(2, 3), nn.SequentialCell(nn.ReLU(), middle), nn.Dense(3, 1)
        self.update_parameters_name(prefix)

    def construct(self, x, y):
        return ops.square(self.last(self.middle(self.first(x) + 10.0)) - y).mean()


INPUTS = Tensor(np.ones((4, 2), np.float32)), Tensor(np.ones((4, 1), np.float32))
ITSELF = "an operator of this cell raises the register itself, at every scale."
WHAT_TO_DO = "use another operator there; report it to the vendor of the device; or, at your own risk, pass"


def training_cell(*middles, cell_class=ScaledTrainOneStepCell, **keywords):
    networks = [Network(middle, f"{i}.") for i, middle in enumerate(middles)]
    optimizers = [nn.SGD(network.trainable_params(), 0.01) for network in networks]
    if cell_class is ScaledTrainOneStepCell:
        networks, optimizers = networks[0], optimizers[0]
    with emulation.saturation_mode():
        return cell_class(networks, optimizers, DynamicLossScale(), **keywords).set_train()


@quick_in_graph_mode
def test_a_backward_that_always_raises_it(mode):
    cell = training_cell(Raises("backward"))
    with untouched(cell):
        trace = locate_overflow(cell, INPUTS, loss_scale=2.0**10)
    assert (trace.found, trace.cell, trace.direction, trace.kind) == (True, "middle.1", "backward", "register")
    says = f"all values are finite, but the status register is up in the backward of {trace.cell}."
    assert says in str(trace) and ITSELF in trace.note and WHAT_TO_DO in trace.note

    with untouched(cell), pytest.raises(RuntimeError) as caught:
        cell.find_loss_scale(*INPUTS)
    assert says in str(caught.value) and ITSELF in str(caught.value)
    assert "NaN" not in str(caught.value)

    advice = advise_float32(cell, [INPUTS])
    assert (advice.in_register.cell, advice.cells) == ("middle.1", [])
    assert says in str(advice) and ITSELF in str(advice)
    assert not emulation.register.raised


@pytest.mark.slow
def test_a_plain_network(mode):
    network = Network(Raises("backward"))
    with emulation.saturation_mode():
        assert locate_overflow(network, INPUTS, loss_scale=1.0).cell == "middle.1"
    # Where no register is read, it does not matter.
    assert not locate_overflow(network, INPUTS, loss_scale=1.0).found
    assert not locate_overflow(
        training_cell(Raises("backward"), overflow_detector=FiniteGradients()), INPUTS, loss_scale=1.0
    ).found


@pytest.mark.slow
def test_one_of_several_networks():
    cell = training_cell(nn.ReLU(), Raises("backward"), cell_class=SimultaneousTrainOneStepCell)
    assert locate_overflow(cell, INPUTS, loss_scale=1.0).cell == "networks[1].middle.1"


@pytest.mark.slow
def test_a_value_within_a_backward(mode):
    """The gradient that flows back is of the order of the loss scale."""
    trace = locate_overflow(training_cell(Raises("backward", 1e6)), INPUTS, loss_scale=16.0)
    assert (trace.cell, trace.direction, trace.kind) == ("middle.1", "backward", "register")
    assert "At loss scale 2**-24 it stays down, so a value inside this cell overflows" in trace.note


@pytest.mark.slow
def test_a_forward(mode):
    trace = locate_overflow(training_cell(Raises("forward")), INPUTS, loss_scale=1.0)
    assert (trace.cell, trace.direction, trace.kind) == ("middle.1", "forward", "register")
    assert trace.note.startswith("Either a value inside this cell overflows, though none that it puts out, or")


@pytest.mark.slow
def test_a_batch_that_is_not_finite():
    """Saturation hides it from all values behind it."""
    inputs = Tensor(np.float32([[np.nan, 1]])), Tensor(np.ones((1, 1), np.float32))
    network = emulation.saturate(Network(nn.ReLU()))
    with emulation.saturation_mode():
        cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.01), DynamicLossScale()).set_train()
    trace = locate_overflow(cell, inputs, loss_scale=1.0)
    assert trace.note == "The batch itself holds values that are not finite."


@quick_in_pynative_mode
def test_nothing_is_said_of_a_register_that_stays_down(mode):
    cell = training_cell(nn.ReLU())
    assert not locate_overflow(cell, INPUTS, loss_scale=1.0).found
    assert advise_float32(cell, [INPUTS]).in_register is None
