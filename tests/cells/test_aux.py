"""Aux is what the network returned in this call, whatever it consists of, and no Parameter that moves on."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import Tensor, nn

from ms_lossscale import ScaledTrainOneStepCell, SimultaneousTrainOneStepCell


def of_any_form(weight, loss):
    return (
        {"weight": weight},
        {},
        {"loss": {"of": loss, "none": None}},
        None,
        weight,
        (weight, (loss, weight)),
        [{"number": 3, "none": None}, [loss, weight]],
    )


class TwoLosses(nn.Cell):
    def __init__(self, losses):
        super().__init__()
        self.first, self.second = nn.Dense(4, 1), nn.Dense(4, 1)
        self.losses = losses

    def construct(self, x):
        first, second = self.first(x).mean(), self.second(x).mean()
        aux = of_any_form(self.first.weight, first)
        return (first, second, *aux) if self.losses == 2 else (first, *aux)


def shape_of(value):
    """The value with its tensors' shapes in the place of its tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: shape_of(each) for name, each in value.items()}
    return type(value)(map(shape_of, value)) if isinstance(value, (tuple, list)) else value


def tensors_in(value):
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else []
    return [tensor for each in values for tensor in tensors_in(each)]


@pytest.mark.parametrize(
    ("mode", "losses"),
    [("graph", 1), ("graph", 2), ("pynative", 2), *slow(("pynative", 1))],
    indirect=["mode"],
)
def test_aux_of_any_form_is_a_copy(mode, losses):
    network = TwoLosses(losses)
    optimizers = [nn.SGD(part.trainable_params(), 0.1) for part in (network.first, network.second)]
    if losses == 1:
        cell = ScaledTrainOneStepCell(network, optimizers[0], 2.0**10, has_aux=True)
    else:
        cell = SimultaneousTrainOneStepCell(network, optimizers, 2.0**10, has_aux=True)
    for step in range(2):
        before = network.first.weight.asnumpy().copy()
        x = Tensor(np.full((2, 4), step + 1.0, np.float32))
        output = cell(x)
        aux = output[-1] if losses == 1 else output[-1][0]
        assert shape_of(aux) == shape_of(of_any_form(network.first.weight, output[0]))
        weights = [tensor for tensor in tensors_in(aux) if tensor.ndim == 2]
        assert weights and not np.array_equal(before, network.first.weight.asnumpy())
        for weight in weights:
            assert not isinstance(weight, mindspore.Parameter)
            np.testing.assert_array_equal(weight.asnumpy(), before)
