"""What a forward writes and leaves infinite or NaN is found, and named, by all that looks for overflows."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.training import by_sgd
from support.untouched import untouched

from ms_lossscale import DynamicLossScale, advise_float32, locate_overflow

FEATURES = 4
ONE_SAMPLE = Tensor(np.ones((1, FEATURES), np.float32)), Tensor(np.zeros((1, 1), np.float32))


def with_loss(network):
    return nn.WithLossCell(network, nn.MSELoss())


def cell_of(network):
    return by_sgd(network, DynamicLossScale(2.0**4))


def normalised():
    return with_loss(nn.SequentialCell(nn.Dense(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dense(6, 1)))


@pytest.mark.parametrize("what", ["cell", "network"])
def test_a_batch_of_one_sample_has_no_variance(mode, what):
    network = normalised()
    looked_at = cell_of(network) if what == "cell" else network
    with untouched(network):
        trace = locate_overflow(looked_at, [ONE_SAMPLE], loss_scale=1.0)
    assert trace[:6] == (True, 1.0, "_backbone.1", "forward", "1.moving_variance", "NaN")
    assert (trace.index, trace.tensor.non_finite, trace.inputs[0].shape) == ((0,), 6, (1, 6))
    assert trace.note.startswith("A batch of one sample, as a dataset's last one may be, has no variance")
    assert "in the forward of _backbone.1: 1.moving_variance, which it writes, is NaN (nan) at (0,)\n" in str(trace)
    advice = advise_float32(network, [ONE_SAMPLE], parameters=network.trainable_params())
    assert (advice.holds, advice.cells, str(advice.trace)) == (False, [], str(trace))


def test_find_loss_scale_says_so(mode):
    cell = cell_of(normalised())
    before = {name: parameter.asnumpy().copy() for name, parameter in cell.parameters_dict().items()}
    message = r"overflows at every power of two .* in what the forward writes, such as .*locate_overflow\(cell"
    with pytest.raises(RuntimeError, match=message):
        cell.find_loss_scale(*ONE_SAMPLE)
    for name, parameter in cell.parameters_dict().items():
        np.testing.assert_array_equal(parameter.asnumpy(), before[name])


class Overflows(nn.Cell):
    """A BatchNorm whose float16 input overflows. What it puts out is masked, so that loss and gradients are finite."""

    def __init__(self):
        super().__init__()
        self.up = nn.Dense(FEATURES, 6, weight_init="ones", has_bias=False).to_float(mstype.float16)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Dense(6, 1)

    def construct(self, x):
        normed = self.norm(self.up(x))
        masked = ops.select(ops.isfinite(normed), normed, ops.zeros_like(normed))
        return self.head(masked.astype(mstype.float32))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)  # Graph mode drops the cast to float16 and back.
def test_the_input_of_a_normalisation_that_overflows_is_a_case_for_float32(mode):
    network = with_loss(Overflows())
    batch = Tensor(np.linspace(3e4, 4e4, 16).reshape(4, 4), mstype.float32), Tensor(np.zeros((4, 1), np.float32))
    cell = cell_of(network)
    cell(*batch)
    assert cell.skip_reasons()["forward_state"] == 1
    for _ in range(48):
        cell(*batch)
    with pytest.warns(RuntimeWarning, match=r"mostly 'forward_state'.*ms_lossscale\.advise_float32 finds the cells"):
        cell(*batch)
    assert locate_overflow(cell, [batch], loss_scale=1.0).cell == "_backbone.up"
    advice = advise_float32(cell, [batch])
    assert (advice.cells, advice.holds) == (["_backbone.up"], True)


class WritesForOthers(nn.Cell):
    """Writes a Parameter of a cell inside, which it does not call, and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 1)
        self.held = nn.Cell()
        self.held.largest = Parameter(Tensor([0.0]), name="largest", requires_grad=False)
        self.register_buffer("last", Tensor([0.0]))

    def construct(self, x, y):
        ops.assign(self.held.largest, x.max().reshape((1,)) / 0)
        return ops.square(self.dense(x) - y).mean()


def test_what_a_cell_writes_for_another_one():
    network = WritesForOthers()
    trace = locate_overflow(network, [ONE_SAMPLE], loss_scale=1.0)
    assert (trace.cell, trace.what, trace.kind) == ("held", "largest", "inf")
    assert advise_float32(network, [ONE_SAMPLE]).trace == trace
