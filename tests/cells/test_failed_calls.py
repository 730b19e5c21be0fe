"""A call that an exception ends leaves nothing behind in MindSpore: no cast, no recording of a gradient.

MindSpore itself leaves both, in PyNative mode, which also profiles the networks of graph mode."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.composite.base import _pynative_executor
from support.in_mode import in_mode
from support.networks import FEATURES, batch
from support.training import cell_of, changed, state

from ms_lossscale import ScaledTrainOneStepCell


class Raises(nn.Cell):  # Its layers compute in float16, and Python raises in them as long as `error` is set.
    def __init__(self, error):
        super().__init__()
        self.layers = _Layers(error).to_float(mstype.float16)

    def construct(self, x, y):
        return ops.square(self.layers(x).astype(mstype.float32) - y).mean()


class _Layers(nn.Cell):
    def __init__(self, error):
        super().__init__()
        self.norm, self.dense, self.error = nn.BatchNorm1d(FEATURES), nn.Dense(FEATURES, 1), error

    def construct(self, x):
        x = self.dense(self.norm(x))
        if self.error is not None:
            raise self.error
        return x


def casts():  # Whether MindSpore casts what is computed outside of any cell.
    ones = Tensor(np.ones((2, 2), np.float32))
    return ops.matmul(ones, ones).dtype != mstype.float32


def records():  # Whether MindSpore records for a gradient.
    return _pynative_executor.grad_flag()


@pytest.fixture
def in_pynative_mode():
    with in_mode(mindspore.PYNATIVE_MODE):
        yield
        _pynative_executor.clear_res()


def test_mindspore_leaves_both(in_pynative_mode):
    # If it does not, forget_failed_calls of ms_lossscale/_mindspore/pynative.py is not needed.
    network = Raises(TypeError("on purpose"))
    assert not casts() and not records()
    with pytest.raises(TypeError, match="on purpose"):
        ops.value_and_grad(network, None, ParameterTuple(network.trainable_params()))(*batch())
    assert casts() and records()


def cell_of_kind(kind, error):  # A training cell, and its networks, of which the last raises.
    networks = [Raises(None), Raises(error)][-1 if kind == "scaled" else 0 :]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"networks_{i}.")
    optimizers = [nn.Momentum(network.trainable_params(), 0.01, 0.9) for network in networks]
    return cell_of(kind, networks, optimizers, 2.0**10), networks


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("scaled", TypeError("on purpose")),
        *slow(("scaled", KeyboardInterrupt()), ("simultaneous", TypeError("on purpose"))),
        *slow(("alternating", KeyboardInterrupt())),
    ],
)
def test_a_training_cell_leaves_nothing(in_pynative_mode, kind, error):
    cell, networks = cell_of_kind(kind, error)
    with pytest.raises(type(error)):
        cell(*batch())
    assert not casts() and not records()
    networks[-1].layers.error = None
    assert np.isfinite(cell(*batch())[0].asnumpy()).all()
    assert not casts() and not records()


def test_the_first_step_of_a_cell_is_not_cast(in_pynative_mode):
    cells = []
    for _ in range(2):
        mindspore.set_seed(1)
        network = Raises(None)
        optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        cells.append(ScaledTrainOneStepCell(network, optimizer, 2.0**10, ema_decay=0.9).set_train())
    cells[0](*batch())
    # A call of the user's own, an evaluation say.
    with pytest.raises(TypeError, match="on purpose"):
        Raises(TypeError("on purpose"))(*batch())
    assert casts()
    cells[1](*batch())
    assert not changed(*map(state, cells))
