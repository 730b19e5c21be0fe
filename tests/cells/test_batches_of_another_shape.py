"""A step is compiled once for all batch sizes, if `set_inputs` tells it that they vary."""

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import Around

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell

SIZES = (8, 3, 8)


class LossAndAux(Around):  # Returns a loss and aux.
    def construct(self, x, y):
        output = self.network(x)
        return ops.square(output - y).mean(), output


class LossOf(Around):
    def construct(self, x, y):
        return ops.square(self.network(x) - y).mean()


def nets():
    mindspore.set_seed(0)
    made = [nn.Dense(4, 1) for _ in range(2)]
    for i, net in enumerate(made):
        net.update_parameters_name(f"net_{i}.")
    return made, [nn.Momentum(net.trainable_params(), 0.01, 0.9) for net in made]


def scaled():
    (net, _), (optimizer, _) = nets()
    keywords = {"has_aux": True, "gradient_accumulation_steps": 2, "clip_norm": 1.0, "ema_decay": 0.9}
    return ScaledTrainOneStepCell(LossAndAux(net), optimizer, DynamicLossScale(), **keywords)


def alternating():
    networks, optimizers = nets()
    return AlternatingTrainOneStepCell([LossOf(net) for net in networks], optimizers, DynamicLossScale())


CELLS = {"scaled": scaled, "alternating": alternating}


def train(cell):  # All that the cell returns, as bytes.
    outputs = []
    for size in SIZES:
        rng = np.random.default_rng(size)
        x, y = (Tensor(rng.normal(size=(size, width)).astype(np.float32)) for width in (4, 1))
        outputs.append([value.asnumpy().tobytes() for value in flat(cell(x, y))])
    return outputs


def flat(values):
    return [each for value in values for each in (flat(value) if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("mode", slow("graph"), indirect=True)
@pytest.mark.parametrize("name", CELLS)
def test_one_graph_serves_all_sizes_with_the_same_results(mode, name):
    cell, told = CELLS[name](), CELLS[name]()
    told.set_inputs(*(Tensor(shape=[None, width], dtype=mstype.float32) for width in (4, 1)))
    assert train(told) == train(cell)
    assert len(told.compile_cache) == 1
    # MindSpore's way otherwise: a graph for each size.
    assert len(cell.compile_cache) == len(set(SIZES))
